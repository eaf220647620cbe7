"""What requests change in the logits that their branches' next tokens are drawn from, or guessed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.sampling.penalties import Ints, Penalties, forbid, penalise
from engine.scheduler.sequence import GenerateSequence


class Point(NamedTuple):
    """Where a token is drawn or guessed: after a branch and some guesses."""

    sequence: GenerateSequence
    guessed: Sequence[int]
    """The guesses before it, as far as they are known; penalties count them."""
    ahead: int
    """How many there are."""


def change(logits: Tensor, points: Sequence[Point]) -> None:
    """Applies bias, penalties and ``min_tokens`` in place (``engine.sampling.penalties``); a point for each row of
    ``logits`` ``[rows, vocab]``."""
    penalties, short = penalties_of(points), forbidden_at(points)
    if penalties:
        penalise(logits.numpy(), list(penalties), list(penalties.values()))
    if short:
        forbid(logits.numpy(), list(short), list(short.values()))


def penalties_of(points: Sequence[Point]) -> dict[int, Penalties]:
    """By the place of a point, of those whose requests have any."""
    return {
        row: sequence.penalties.fork(guessed) if guessed else sequence.penalties
        for row, (sequence, guessed, _) in enumerate(points)
        if sequence.penalties is not None
    }


def forbidden_at(points: Sequence[Point]) -> dict[int, Ints]:
    """The tokens that would end a branch too early, by the place of a point."""
    return {
        row: sequence.forbidden
        for row, (sequence, _, ahead) in enumerate(points)
        if sequence.forbidden is not None and len(sequence.written) + ahead < sequence.sampling.min_tokens
    }
