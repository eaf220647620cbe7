"""Probability that an answer is right: from votes and scores (``posterior``, ``stopping_rules``), from token
log-probabilities (``token_confidence``), and the fitted table of the ``auto`` strategy (``calibration``).

Modules import what they need from the submodules; nothing is exported here.
"""
