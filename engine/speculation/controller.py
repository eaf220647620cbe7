"""How much is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.sequence import GenerateSequence
from engine.speculation.draft import Draft, Wish


class Outcome(NamedTuple):
    """What became of one branch's draft."""

    sequence: GenerateSequence
    draft: Draft
    """As it was computed."""
    accepted: tuple[int, ...]
    """Indices of the accepted tokens, from the root on."""


class Controller(Protocol):
    """Decides how much is guessed for whom.

    One thread calls it. A step calls ``sizes`` if branches are due, ``trim`` if any of them is to get guesses, and
    ``learn`` when it is done, whether or not anything was guessed.
    """

    def sizes(self, sequences: Sequence[GenerateSequence], others: int, /) -> list[tuple[int, int]]:
        """For each branch that is due one token, the most guesses after each other and the most in all (``Wish``); 0, 0
        for none. ``others``: tokens that the step computes for prompts."""
        ...

    def trim(self, wishes: Sequence[Wish], drafts: Sequence[Draft], /) -> list[Draft]:
        """The parts of the drafts that are worth computing, one for each wish."""
        ...

    def learn(self, outcomes: Sequence[Outcome], tokens: int, drafting: float, step: float, /) -> None:
        """A step with ``tokens`` tokens in all took ``step`` seconds, and drafting ``drafting`` beside it; there is an
        outcome for each branch that had guesses."""
        ...

    def forget(self, sequence: GenerateSequence, /) -> None:
        """A branch is over."""
        ...


@dataclass(frozen=True, slots=True)
class FixedController:
    """Always the same: for tests, and to measure drafters by."""

    depth: int
    nodes: int
    """``depth`` for chains, more for trees."""

    def sizes(self, sequences: Sequence[GenerateSequence], _: int, /) -> list[tuple[int, int]]:
        """See ``Controller``."""
        return [(self.depth, self.nodes)] * len(sequences)

    def trim(self, _: Sequence[Wish], drafts: Sequence[Draft], /) -> list[Draft]:
        """See ``Controller``."""
        return list(drafts)

    def learn(self, _outcomes: Sequence[Outcome], _tokens: int, _drafting: float, _step: float, /) -> None:
        """See ``Controller``."""

    def forget(self, _: GenerateSequence, /) -> None:
        """See ``Controller``."""
