"""Who decides how much is guessed, and what that is decided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.scheduler.draft import Draft
from engine.scheduler.sequence import GenerateSequence
from engine.speculation.drafter import DraftRequest

MAX_SKIPPED_STEPS = 63
"""Steps after each other that are not looked at where guessing does not pay, at most."""


class DraftOutcome(NamedTuple):
    """What became of one branch's draft."""

    sequence: GenerateSequence
    draft: Draft
    """As it was computed."""
    accepted: tuple[int, ...]
    """Indices of the accepted tokens, from the root on."""


class Controller(Protocol):
    """Decides how much is guessed for whom.

    One thread calls it. A step in which branches are due calls ``sizes``, then ``trim`` if any of them is to get
    guesses, and ``learn`` when it is done, whether or not anything was guessed; but for steps that fail, and for those
    that it wants to hear nothing of.
    """

    def choose_sizes(
        self, sequences: Sequence[GenerateSequence], others: int, rested: int, /
    ) -> Sequence[tuple[int, int]]:
        """Return, for each branch that needs one token, the maximum depth and number of draft tokens; 0, 0 for none.

        ``others``: tokens that the step computes for prompts. ``rested``: steps skipped since the last ``update``.
        """
        ...

    def trim(self, wishes: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        """The parts of the drafts that are worth computing, one for each wish."""
        ...

    def update(
        self, outcomes: Sequence[DraftOutcome], tokens: int, drafting: float, step: float, first: bool, /
    ) -> int:
        """A step with ``tokens`` tokens in all took ``step`` seconds, and drafting ``drafting`` beside it; there is an
        outcome for each branch that had guesses. ``first``: something was done for the first times, so that the like of
        it will take less. Answers how many steps from now on are to go without guesses and
        without a word to the controller, as long as the number of branches is about the same."""
        ...


@dataclass(frozen=True, slots=True)
class FixedController:
    """Always the same: for tests, and to measure drafters by."""

    depth: int
    nodes: int
    """``depth`` for chains, more for trees."""

    def choose_sizes(self, sequences: Sequence[GenerateSequence], _: int, _rested: int, /) -> Sequence[tuple[int, int]]:
        """See ``Controller``."""
        return [(self.depth, self.nodes)] * len(sequences)

    def trim(self, _: Sequence[DraftRequest], drafts: Sequence[Draft], /) -> list[Draft]:
        """See ``Controller``."""
        return list(drafts)

    def update(
        self, _outcomes: Sequence[DraftOutcome], _tokens: int, _drafting: float, _step: float, _first: bool, /
    ) -> int:
        """See ``Controller``."""
        return 0
