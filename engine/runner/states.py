"""The states that a step of a model with stateful layers reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.paged_kv import PageTable
from engine.cache.state_layers import StateStep
from engine.cache.states import SLOTS_PER_SEQUENCE, SequenceState, StatePool
from engine.device import DeviceConfig
from engine.models.config import ModelConfig
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from engine.runner.batch import ScheduledSequence
from engine.scheduler.draft import EMPTY_DRAFT

_DEFAULT_STATE_BYTES = 1 << 30
_SNAPSHOTS_PER_SEQUENCE = 4
"""Slots by default for each sequence that may run, besides those that it needs."""
_PURE_DISTANCE = 256
"""Tokens between two snapshots of a model that has no keys to compare the memory with."""


def check_slots(config: ModelConfig, options: EngineOptions) -> None:
    """Raise ``EngineError`` if the options leave no room for the states of one sequence."""
    if config.states and options.state_slots is not None and options.state_slots < SLOTS_PER_SEQUENCE:
        raise EngineError(
            f"state_slots is {options.state_slots}; this model has layers with states, and a sequence needs "
            f"{SLOTS_PER_SEQUENCE}: the state that a step reads, and the one that it writes"
        )


def create_states(
    config: ModelConfig, options: EngineOptions, kv_bytes_per_token: int, device_config: DeviceConfig
) -> StatePool | None:
    """Return the pool of a model's states; ``None`` if it has none.

    Snapshots along a sequence lie as far apart as it takes keys and values to fill the memory of one.
    """
    if not config.states:
        return None
    slots = options.state_slots
    if slots is None:
        wanted = (SLOTS_PER_SEQUENCE + _SNAPSHOTS_PER_SEQUENCE) * options.max_running
        slots = max(SLOTS_PER_SEQUENCE, min(wanted, _DEFAULT_STATE_BYTES // config.state_bytes))
    distance = -(-config.state_bytes // kv_bytes_per_token) if kv_bytes_per_token else _PURE_DISTANCE
    whole_pages = -(-distance // options.page_size) * options.page_size
    return StatePool(config.states, slots, snapshot_distance=whole_pages, device_config=device_config)


def limit_drafts(scheduled: Sequence[ScheduledSequence], pool: StatePool) -> list[ScheduledSequence]:
    """Return scheduled sequences without the drafts whose states no slots are left for."""
    if not any(one.draft.tokens for one in scheduled):
        return list(scheduled)
    num_spare = pool.count_spare_slots(_get_state(one.sequence.pages) for one in scheduled)
    limited: list[ScheduledSequence] = []
    for one in scheduled:
        fits = len(one.draft) <= num_spare
        limited.append(one if fits else one._replace(draft=EMPTY_DRAFT))
        num_spare -= len(one.draft) if fits else 0
    return limited


def plan_states(scheduled: Sequence[ScheduledSequence], pool: StatePool) -> StateStep:
    """Plan the states of a step, given its sequences in the order of the batch."""
    return pool.plan([(_get_state(sequence.pages), count, draft.parents) for sequence, count, draft in scheduled])


def _get_state(table: PageTable) -> SequenceState:
    if table.state is None:
        raise RuntimeError("the sequence has no state")
    return table.state
