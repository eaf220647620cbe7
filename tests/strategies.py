"""Names of strategies, for tests that try all of them."""

from __future__ import annotations

from reasoner.strategies.base import Feature, VerifierUse
from reasoner.strategies.registry import STRATEGIES

WRITING = sorted(name for name, strategy in STRATEGIES.items() if Feature.CANDIDATES not in strategy.supports)
"""Strategies that write solutions; the others need a job with candidates of its own."""
COMPARING = frozenset(name for name in WRITING if STRATEGIES[name].verifier is VerifierUse.COMPARISONS)
"""Strategies that need a verifier that compares solutions."""
SCORING = frozenset(
    name for name in WRITING if STRATEGIES[name].needs_verifier or STRATEGIES[name].verifier is VerifierUse.OPTIONAL
)
"""Strategies that use scores of solutions, if they do not need them."""
