"""The interface of controllers of the draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest

MAX_SKIPPED_STEPS = 63
"""Maximum number of consecutive steps that are not measured while drafting does not pay."""


class DraftOutcome(NamedTuple):
    """Outcome of one branch's draft."""

    sequence: GenerateSequence
    draft: Draft
    """The draft that was verified."""
    accepted: tuple[int, ...]
    """Indices of the accepted tokens, from the root down."""


class StepCost(NamedTuple):
    """Tokens and seconds of a step."""

    num_tokens: int
    """Number of tokens computed in all."""
    drafting_seconds: float
    other_seconds: float
    """Seconds spent on the rest of the step."""
    has_first_runs: bool = False
    """True if something ran for the first time, so that the same step will be faster next time."""


class Controller(Protocol):
    """Chooses the draft size of each branch.

    Not thread-safe. A step with decoding branches calls ``choose_sizes``, then ``trim`` if drafts were proposed, and
    ``update`` when it is done, whether or not anything was drafted; steps that fail or are skipped do not.
    """

    def choose_sizes(
        self, sequences: Sequence[GenerateSequence], num_other_tokens: int, num_skipped: int, /
    ) -> Sequence[tuple[int, int]]:
        """Return, for each branch that needs one token, the maximum depth and number of draft tokens; 0, 0 for none.

        ``num_other_tokens``: tokens that the step computes for prompts. ``num_skipped``: steps skipped since the last
        ``update``."""
        ...

    def trim(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        """Return the parts of the drafts that are worth verifying, one for each request."""
        ...

    def update(self, outcomes: Sequence[DraftOutcome], cost: StepCost, /) -> int:
        """Learn from a step; return how many of the following steps are to be skipped.

        ``outcomes``: one for each branch that had a draft. Skipping ends early if the number of branches changes.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedController:
    """A controller with a fixed size, for tests and measurements of drafters."""

    depth: int
    nodes: int
    """Maximum number of draft tokens: ``depth`` for chains, more for trees."""

    def choose_sizes(
        self, sequences: Sequence[GenerateSequence], _num_other_tokens: int, _num_skipped: int, /
    ) -> Sequence[tuple[int, int]]:
        return [(self.depth, self.nodes)] * len(sequences)

    def trim(self, _: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        return list(drafts)

    def update(self, _outcomes: Sequence[DraftOutcome], _cost: StepCost, /) -> int:
        return 0
