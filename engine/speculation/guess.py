"""What a drafter guesses, given the logits of its own law for the next token: what the branch would draw from that law.

A guess is made with the very noise that the branch's own draw will have (``engine.speculation`` says why), so it is the
argmax of the law's logits over the temperature plus Gumbel noise, and the runners-up of that argmax are the best other
candidates for a tree (top-k with shared noise). Only the likeliest tokens of the law are looked at: what lies below is
hardly ever drawn, and guessing it right even less often.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.penalties import forbid, penalise
from engine.sequence import GenerateSequence
from kernels.noise import SAMPLE, gumbel_noise, noise_streams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CANDIDATES = 32
"""Likeliest tokens of a law that are looked at."""


class Guesses:
    """The best guesses for some branches, up to ``depth`` tokens ahead of what they have."""

    def __init__(self, sequences: Sequence[GenerateSequence], depth: int) -> None:
        self._sequences = sequences
        about = [s.sampling for s in sequences]
        heat = np.array([one.temperature for one in about])
        self._noisy = heat > 0
        self._heat = np.where(self._noisy, heat, 1.0)
        self._special = [branch for branch, s in enumerate(sequences) if s.penalties or s.forbidden is not None]
        filters = [(one.top_k or _CANDIDATES, one.top_p, one.min_p) for one in about]
        self._filters = np.array(filters)
        self._filtered = any(one != (_CANDIDATES, 1.0, 0.0) for one in filters)
        where = np.array([(s.seed, s.key, len(s.tokens)) for s in sequences], np.int64).repeat(depth, axis=0)
        seed, key, position = where.T
        position = position + np.tile(np.arange(depth), len(sequences))
        self._streams = noise_streams(seed, key, position, SAMPLE).reshape(-1, depth)

    def best(self, logits: Tensor, branches: Ints, ahead: Ints, width: int) -> tuple[Ints, Floats]:
        """Guesses for rows of a drafter's ``logits`` ``[rows, vocab]`` float32, which it may change.

        ``branches``, ``ahead``: ``[rows]`` whose row it is, and how many guesses lie before the one that is made.
        Returns tokens and the chances that they are right, ``[rows, width]``, the best first. A chance is a token's
        share of ``exp`` of the noisy logits: as if what the target knows better than the drafter were noise of the size
        of the sampling noise (for a greedy branch: of temperature 1).
        """
        self._change(logits, branches, ahead)
        top = logits.topk(min(_CANDIDATES, logits.shape[1]))
        tokens, values = top.indices.numpy(), top.values.numpy() / self._heat[branches, None]
        noisy = self._noisy[branches]
        scores = values
        if noisy.any():
            scores = values + gumbel_noise(self._streams[branches, ahead, None], tokens) * noisy[:, None]
        if self._filtered:
            scores = np.where(self._kept(values, branches), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        order = (
            weights.argmax(axis=1)[:, None] if width == 1 else np.argsort(-weights, axis=1, kind="stable")[:, :width]
        )
        chances = np.take_along_axis(weights, order, axis=1) / weights.sum(axis=1, keepdims=True)
        return np.take_along_axis(tokens, order, axis=1), chances

    def _change(self, logits: Tensor, branches: Ints, ahead: Ints) -> None:
        """What requests change in their branches' logits, as if the guesses before changed nothing."""
        rows = np.flatnonzero(np.isin(branches, self._special)) if self._special else ()
        owners = [(int(row), self._sequences[branches[row]]) for row in rows]
        penalties = [(row, s.penalties) for row, s in owners if s.penalties is not None]
        if penalties:
            penalise(logits.numpy(), [row for row, _ in penalties], [one for _, one in penalties])
        short = [
            (row, s.forbidden)
            for row, s in owners
            if s.forbidden is not None and len(s.written) + ahead[row] < s.sampling.min_tokens
        ]
        if short:
            forbid(logits.numpy(), [row for row, _ in short], [one for _, one in short])

    def _kept(self, values: Floats, branches: Ints) -> npt.NDArray[np.bool_]:
        """Which candidates the filters keep; those of a law whose candidates are not all its tokens, nearly. The first
        is always kept, and greedy rows have no other to lose."""
        top_k, top_p, min_p = self._filters[branches].T[..., None]
        weights = np.exp(values - values[:, :1])
        before = weights.cumsum(axis=1) - weights
        kept: npt.NDArray[np.bool_] = (before < top_p * weights.sum(axis=1, keepdims=True)) & (weights >= min_p)
        kept &= np.arange(values.shape[1]) < top_k
        return kept
