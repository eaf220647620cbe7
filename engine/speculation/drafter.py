"""Guesses at how branches go on, and what a drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.cache.paged_kv import KVCache
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence


class DraftRequest(NamedTuple):
    """What is asked of a drafter for one branch."""

    sequence: GenerateSequence
    """All its tokens but the last are computed."""
    depth: int
    """Most tokens after each other, at least 1."""
    nodes: int
    """Most tokens in all, at least ``depth``; as many mean a chain."""


class StepResult(NamedTuple):
    """What a step did to one branch that goes on."""

    sequence: GenerateSequence
    """With the tokens that it drew; all but the last are computed."""
    first_position: int
    """Position of the first token whose hidden state the step computed and keeps."""
    rows: Sequence[int]
    """Rows of the step's hidden states, for the positions from ``first`` on."""


class HiddenStateNeeds(Enum):
    """The steps that a drafter must hear of."""

    NONE = auto()
    """It reads what it missed from the branches' tokens: when it is told of a step, then of none of its branches."""
    LAST = auto()
    """The one before it is asked."""
    ALL = auto()


class Drafter(Protocol):
    """Guesses tokens. What it guesses changes the speed, never the result.

    One thread calls it. It sees the same tokens again and again: a branch may be preempted, cut and continued by
    another request, or forked at any token, and the cached prefix of a new branch was computed without it.
    """

    kind: str
    """Its name for people, metrics and options."""
    layers: int
    """Layers of keys and values that it keeps in the target's pages, behind the target's own; usually 0."""
    hidden_state_needs: HiddenStateNeeds
    """Of which steps ``advance`` must be told."""

    def reset(self, cache: KVCache) -> None:
        """The target's cache is this one now, and empty; no branch is known. Called before anything else."""
        ...

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        """Guesses for each branch, ``EMPTY`` where there are none."""
        ...

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        """Learns what a step computed: ``hidden`` ``[rows, width]`` are the target's final hidden states, before its
        last norm. Called after every step, prompts' chunks included (they may have drawn nothing yet), but see
        ``watches``."""
        ...

    def release(self, sequence: GenerateSequence) -> None:
        """A branch is over, whatever the reason; it may never have been seen before."""
        ...

    def clear_cache(self) -> None:
        """Forgets the keys and values of its own that no running branch uses."""
        ...
