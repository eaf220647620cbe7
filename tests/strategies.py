"""Names of strategies, for tests that try all of them."""

from __future__ import annotations

from reasoner.strategies.registry import STRATEGIES

WRITING = sorted(name for name, strategy in STRATEGIES.items() if not strategy.takes_candidates)
"""Strategies that write solutions; the others need a job with candidates of its own."""
