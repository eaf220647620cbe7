"""Statistics of one model's engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Statistics of one model's engine. Tokens are counted since the start."""

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    pinned_tokens: int
    """Slots in pages that leases pin."""
    leases: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    """Draft tokens that were verified."""
    accepted_tokens: int
    """Draft tokens that were accepted, each of which saved a step."""
    scored_tokens: int
    preemptions: int

    @property
    def hit_rate(self) -> float:
        """Cached share of prompt tokens."""
        return self.cached_tokens / max(self.prompt_tokens, 1)
