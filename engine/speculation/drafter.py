"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.attention.layer import HeadShape
from engine.cache.paged_kv import KVCache
from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence


class DraftRequest(NamedTuple):
    """A request for a draft of one branch."""

    sequence: GenerateSequence
    """Branch of which all tokens but the last are computed."""
    depth: int
    """Maximum depth, at least 1."""
    nodes: int
    """Maximum number of draft tokens; a chain is requested if it equals ``depth``, a tree if it is more."""


class StepResult(NamedTuple):
    """Result of a step for one branch that continues."""

    sequence: GenerateSequence
    """Branch with the tokens sampled in the step; all but the last are computed."""
    first_position: int
    """Position of the first token that the step computed and kept."""
    rows: Sequence[int]
    """Rows of the step's hidden states, for the positions from ``first_position`` on."""


class HiddenStateNeeds(Enum):
    """The steps whose hidden states a drafter needs."""

    NONE = auto()
    """No step: the drafter reads the branches' tokens only, and gets empty step results."""
    LAST = auto()
    """The step before each draft."""
    ALL = auto()


class Drafter(Protocol):
    """Proposes draft tokens, which change the speed and never the result.

    Not thread-safe. The same tokens may be passed to a drafter repeatedly: a branch may be preempted, cut and continued
    by another request, or forked at any token. The cached prefix of a new branch was computed without the drafter.
    """

    kind: str
    """Name in options, metrics and logs."""
    key_shapes: tuple[HeadShape, ...]
    """Shapes of the layers of keys and values that it keeps in the target's pages, behind the target's own; usually
    none."""
    hidden_state_needs: HiddenStateNeeds
    """Steps that ``observe_step`` must be called for."""
    observed_layers: tuple[int, ...]
    """Layers of the target before its last, from 1, ascending, after which it observes hidden states; usually none."""

    def reset(self, cache: KVCache) -> None:
        """Forget all branches and start with an empty ``cache`` of the target. Called before any other method."""
        ...

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        """Return a draft for each request, ``EMPTY_DRAFT`` if there is none."""
        ...

    def observe_step(self, steps: Sequence[StepResult], hidden: Tensor) -> None:
        """Observe the result of a step, chunks of prompts included; see ``hidden_state_needs``.

        ``hidden`` ``[rows, width]``: the target's final hidden states, before its last norm; with ``observed_layers``
        instead the hidden states after each of these, side by side.
        """
        ...

    def release(self, sequence: GenerateSequence) -> None:
        """Release the state of a finished branch, for which no other method may have been called."""
        ...

    def warm_ups(self) -> list[Callable[[], None]]:
        """Return computations, to run twice on an empty cache, that compile and capture drafts of common shapes on a
        GPU."""
        ...

    def clear_cache(self) -> None:
        """Drop the drafter's own keys and values that no running branch uses."""
        ...
