"""Budgets: limits of a job (``spec``), its bill (``usage``), prices, the ledger that enforces the limits, and grants of
jobs that share a budget (``allocator``, ``grant_source``).

Modules import what they need from the submodules; nothing is exported here.
"""
