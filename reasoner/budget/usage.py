"""The bill of one job. This model is part of the REST schema."""

from __future__ import annotations

from reasoner.base_model import StrictModel


class Usage(StrictModel):
    """The bill. Counts are tokens; ``total`` is what a token budget is held against."""

    prompt: int = 0
    """Prompt tokens sent to the model, over all requests."""
    cached: int = 0
    """Those of ``prompt`` whose KV was in the cache."""
    generated: int = 0
    drafted: int = 0
    """Guesses at generated tokens that the model computed. No token budget is held against them."""
    accepted: int = 0
    """Those of ``drafted`` that were right: they are among ``generated``."""
    verifier_computed: int = 0
    verifier_cached: int = 0
    pruned: int = 0
    """Generated tokens in branches that the search gave up."""
    seconds: float = 0.0
    flops: float = 0.0
    """Estimated: two per weight and computed token, wrong guesses included; a drafter's own are not counted."""
    cost: float = 0.0
    """By the service's prices per token; 0 where it has none."""

    @property
    def total(self) -> int:
        return self.generated + self.verifier_computed

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.model_fields})
