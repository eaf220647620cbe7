"""Statistics of one model's engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.offloading.stats import OffloadingStats
from engine.scheduler.scheduler import Scheduler
from engine.speculation.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Statistics of one model's engine. Tokens are counted since the start."""

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    state_slots: int
    """Slots of recurrent states in use, those of cached prefixes included."""
    state_capacity: int
    pinned_tokens: int
    """Slots in pinned pages."""
    pins: int
    """Keys under which pages are pinned."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    """Draft tokens that were verified."""
    accepted_tokens: int
    """Draft tokens that were accepted, each of which saved a step."""
    scored_tokens: int
    dropped_tokens: int
    """Tokens whose keys were dropped for a bound on those of a thought."""
    preemptions: int
    offloading: OffloadingStats | None
    """Statistics of the cache's lower tier, if it has one."""

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        speculation: SpeculationStats | None,
        *,
        waiting: int,
        generated_tokens: int,
        scored_tokens: int,
    ) -> CoreStats:
        """Collect the statistics of a scheduler, its cache and its model's speculation."""
        cache = scheduler.cache
        return cls(
            running=len(scheduler.running),
            waiting=waiting,
            kv_tokens=cache.num_used_tokens,
            kv_capacity=cache.pool.size * cache.page_size,
            state_slots=0 if cache.states is None else cache.states.num_used,
            state_capacity=0 if cache.states is None else cache.states.num_slots,
            pinned_tokens=cache.tree.num_pinned * cache.page_size,
            pins=len(cache.pins),
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=generated_tokens,
            drafted_tokens=speculation.drafted if speculation else 0,
            accepted_tokens=speculation.accepted if speculation else 0,
            scored_tokens=scored_tokens,
            dropped_tokens=scheduler.num_dropped_tokens,
            preemptions=scheduler.num_preemptions,
            offloading=None if scheduler.loader is None else scheduler.loader.tier.stats,
        )

    @property
    def hit_rate(self) -> float:
        """Cached share of prompt tokens."""
        return self.cached_tokens / max(self.prompt_tokens, 1)
