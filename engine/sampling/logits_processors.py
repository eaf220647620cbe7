"""Logits processors of requests: bias, penalties and tokens forbidden before ``min_tokens``, for rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.sampling.penalties import Ints, Penalties, forbid, penalise


class LogitsRow(NamedTuple):
    """Logits processors of one row of logits, applied before a token is sampled or drafted from it."""

    penalties: Penalties | None
    """Bias and penalties of the branch, with the tokens it has generated so far."""
    forbidden: Ints | None
    draft_prefix: Sequence[int]
    """Draft tokens between the branch and this row; the penalties count them as generated."""


def apply_logits_processors(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Apply bias, penalties and ``min_tokens`` to ``logits`` ``[rows, vocab]`` on the host, in place."""
    penalties, forbidden = penalties_by_row(rows), forbidden_by_row(rows)
    if penalties:
        penalise(logits.numpy(), list(penalties), list(penalties.values()))
    if forbidden:
        forbid(logits.numpy(), list(forbidden), list(forbidden.values()))


def penalties_by_row(rows: Sequence[LogitsRow]) -> dict[int, Penalties]:
    """Return the penalties of the rows that have any, by row index, with their draft prefixes counted."""
    return {
        index: row.penalties.fork(row.draft_prefix) if row.draft_prefix else row.penalties
        for index, row in enumerate(rows)
        if row.penalties is not None
    }


def forbidden_by_row(rows: Sequence[LogitsRow]) -> dict[int, Ints]:
    """Return the forbidden tokens of the rows that have any, by row index."""
    return {index: row.forbidden for index, row in enumerate(rows) if row.forbidden is not None}
