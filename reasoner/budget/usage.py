"""The bill of one job. This model is part of the REST schema."""

from __future__ import annotations

from reasoner.base_model import StrictModel


class Usage(StrictModel):
    """The bill. Counts are tokens; ``total`` is what a token budget is held against."""

    prompt: int = 0
    """Prompt tokens of all requests."""
    cached: int = 0
    """Tokens of ``prompt`` whose KV was in the cache."""
    generated: int = 0
    thought: int = 0
    """Tokens of ``generated`` that are part of thoughts, if the model's thoughts are known."""
    drafted: int = 0
    """Draft tokens that the model verified. They do not count towards a token budget."""
    accepted: int = 0
    """Accepted draft tokens; they are included in ``generated``."""
    verifier_computed: int = 0
    """Tokens that a verifier computed: what it read without a cached prefix, and what it wrote."""
    verifier_cached: int = 0
    verifier_generated: int = 0
    """Tokens of ``verifier_computed`` that a verifier wrote, in critiques."""
    unscored: int = 0
    """Solutions and pairs on which the verifier was asked and gave no verdict that could be read."""
    pruned: int = 0
    """Generated tokens of pruned branches."""
    dropped: int = 0
    """Tokens of thoughts whose keys were dropped for ``sampling.kv_budget``; they were generated and are billed."""
    saved: int = 0
    """Estimate of the tokens that solutions given up early would still have taken, by the mean length of the others."""
    tool_calls: int = 0
    """Calls of tools, those of pruned branches included."""
    tool_seconds: float = 0.0
    """Time of these calls, each by itself; several run at the same time."""
    seconds: float = 0.0
    flops: float = 0.0
    """Estimate: two per weight and computed token, rejected draft tokens included; a drafter's own are not counted."""
    cost: float = 0.0
    """Cost by the service's prices per token; 0 without prices."""

    @property
    def total(self) -> int:
        return self.generated + self.verifier_computed

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.model_fields})
