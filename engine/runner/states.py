"""The states that a step of a model with stateful layers reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.page_table import PageTable
from engine.cache.state_layers import NO_STATE, StateSegment, StateStep
from engine.cache.states import SLOTS_PER_SEQUENCE, SequenceState, StatePool, StateRow
from engine.device import DeviceConfig
from engine.models.config import ModelConfig
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from engine.runner.batch import ScheduledSequence
from engine.scheduler.draft import EMPTY_DRAFT
from engine.scheduler.sequence import PENDING_TOKEN

DEFAULT_STATE_BYTES = 1 << 30
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


def count_slots(config: ModelConfig, options: EngineOptions, max_bytes: int = DEFAULT_STATE_BYTES) -> int:
    """Return the number of slots of a model's states, 0 if it has none.

    ``max_bytes``: the memory that they may take where the options do not say their number.
    """
    if not config.states:
        return 0
    if options.state_slots is not None:
        return options.state_slots
    wanted = (SLOTS_PER_SEQUENCE + _SNAPSHOTS_PER_SEQUENCE) * options.max_running
    return max(SLOTS_PER_SEQUENCE, min(wanted, max_bytes // config.state_bytes))


def create_states(
    config: ModelConfig, options: EngineOptions, slots: int, kv_bytes_per_token: int, device_config: DeviceConfig
) -> StatePool | None:
    """Return the pool of a model's states with so many slots; ``None`` if it has none.

    Snapshots along a sequence lie as far apart as it takes keys and values to fill the memory of one.
    """
    if not slots:
        return None
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


def plan_first_states(pool: StatePool, counts: Sequence[int], *, has_drafts: bool = False) -> StateStep:
    """Return the states of a step of new sequences over slots that nothing uses, which it fills with any numbers.

    ``counts``: the tokens of each sequence; with ``has_drafts`` all but the first are draft tokens.
    """
    segments: list[StateSegment] = []
    start = 0
    for index, count in enumerate(counts):
        slot, num_own = index % pool.num_slots, 1 if has_drafts else count
        segments.append(StateSegment(start, start + num_own, NO_STATE, slot, num_chained=1 + count - num_own))
        segments += [StateSegment(token, token + 1, slot, slot) for token in range(start + num_own, start + count)]
        start += count
    return StateStep(pool.layers, segments)


def plan_states(scheduled: Sequence[ScheduledSequence], pool: StatePool) -> StateStep:
    """Plan the states of a step, given its sequences in the order of the batch."""
    return pool.plan(
        [
            StateRow(_get_state(sequence.pages), count, draft.parents, sequence.tokens[-1] == PENDING_TOKEN)
            for sequence, count, draft in scheduled
        ]
    )


def _get_state(table: PageTable) -> SequenceState:
    if table.state is None:
        raise RuntimeError("the sequence has no state")
    return table.state
