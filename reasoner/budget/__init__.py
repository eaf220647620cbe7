"""Budgets of jobs: limits, usage, prices, the ledger that enforces the limits, and grants of a shared budget.

Nothing is exported here; import from the submodules.
"""
