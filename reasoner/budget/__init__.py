"""What a job may spend and what it has spent: limits (``spec``), the bill (``usage``), prices, the ledger that holds a
search to its limits, and the grants of jobs that share a budget (``allocator``, ``grant_source``).

Modules import what they need from the submodules; nothing is exported here.
"""
