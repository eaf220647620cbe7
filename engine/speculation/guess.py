"""What a drafter guesses, given the logits of its own law for the next token: what the branch would draw from that law.

A guess is made with the very noise that the branch's own draw will have (``engine.speculation`` says why): it is the
argmax of the law's logits over the temperature plus Gumbel noise, and the runners-up of that argmax are the best other
candidates for a tree (top-k with shared noise). Only the likeliest tokens of the law are looked at: what lies below is
hardly ever drawn, and guessing it right even less often.

A drafter knows less than the target, so its law is flatter, and the target's draw depends less on the noise than its
own would: the noise is counted in part (``NOISE``). Of what the bundled ``policy-large`` draws at temperatures from 0.5
to 1.3, the draft model then guesses 0.4 to 2.3 of a hundred tokens more right, and the policy, which is hardly flatter,
at most 0.6 fewer. The chance of a guess is its share of ``exp(logit + NOISE * temperature * noise)``: as if what the
drafter does not know were noise of the size that a temperature of 1 has. With the draft model that is right to some
hundredths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.changes import Point, change
from engine.sequence import GenerateSequence
from engine.support import Floats, Ints
from engine.types import SamplingParams
from kernels.noise import SAMPLE, Words, gumbel_noise, noise_streams

NOISE = 0.75
"""The part of the noise that is counted; with 1 a drafter that is the target is always right."""
_CANDIDATES = 64
"""Likeliest tokens of a law that are looked at."""


class Guesses:
    """The best guesses for some branches, up to ``depth`` tokens ahead of what they have."""

    def __init__(self, sequences: Sequence[GenerateSequence], depth: int) -> None:
        self._sequences = sequences
        self._temperature = np.array([s.sampling.temperature for s in sequences])
        self.changed = any(s.penalties is not None or s.forbidden is not None for s in sequences)
        """Whether a request changes logits."""
        self._filters = np.array([_filters(s.sampling) for s in sequences])
        self._filtered = bool((self._filters != _UNFILTERED).any())
        self._streams = _streams(sequences, depth) if self._temperature.any() else None

    def best(
        self,
        logits: Tensor,
        branches: Ints,
        ahead: Ints,
        width: int,
        paths: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Ints, Floats]:
        """Guesses for rows of a drafter's ``logits`` ``[rows, vocab]`` float32, which it may change.

        ``branches``, ``ahead``: ``[rows]`` whose row it is, and how many guesses lie before the one that is made.
        ``paths``: these guesses, which penalties count; without them they do not. Returns tokens and the chances that
        they are right, ``[rows, width]``, the best first. A chance is 0 where the branch's filters leave the token out,
        and not a number where the logits are not finite.
        """
        if self.changed:
            self._change(logits, branches, ahead, paths)
        top = logits.topk(min(_CANDIDATES, logits.shape[1]))
        tokens, values = top.indices.numpy(), top.values.numpy()
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            scores = values - values[:, :1].astype(np.float64)
            kept = self._kept(scores, branches) if self._filtered else None
            if self._streams is not None:
                noise = gumbel_noise(self._streams[branches, ahead, None], tokens)
                scores += NOISE * self._temperature[branches, None] * noise
            if kept is not None:
                scores = np.where(kept, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
        order = scores.argmax(axis=1)[:, None] if width == 1 else np.argsort(-scores, axis=1, kind="stable")[:, :width]
        rows = np.arange(len(scores))[:, None]
        return tokens[rows, order], weights[rows, order]

    def _change(self, logits: Tensor, branches: Ints, ahead: Ints, paths: Sequence[Sequence[int]] | None) -> None:
        """Applies what requests change in their branches' logits."""
        change(
            logits,
            [
                Point(self._sequences[branch], paths[row] if paths else (), far)
                for row, (branch, far) in enumerate(zip(branches.tolist(), ahead.tolist(), strict=True))
            ],
        )

    def _kept(self, gaps: Floats, branches: Ints) -> npt.NDArray[np.bool_]:
        """Which candidates the filters keep; top-p is that of the candidates, nearly the law's.

        ``gaps``: ``[rows, candidates]``, the logits minus the first, descending.
        """
        top_k, top_p, min_p = self._filters[branches].T[..., None]
        temperature = self._temperature[branches, None]
        weights = np.exp(gaps / np.where(temperature > 0, temperature, 1))
        weights[np.arange(weights.shape[1]) >= np.broadcast_to(top_k, weights.shape)] = 0
        mass = weights.cumsum(axis=1)
        kept: npt.NDArray[np.bool_] = (mass - weights < top_p * mass[:, -1:]) & (weights >= min_p) & (weights > 0)
        return kept


_UNFILTERED = (_CANDIDATES, 1.0, 0.0)


def _streams(sequences: Sequence[GenerateSequence], depth: int) -> Words:
    """The noise of each branch at its next places, ``[branches, depth]``."""
    where = np.array([(s.seed, s.key, len(s.tokens)) for s in sequences], np.int64).repeat(depth, axis=0)
    seed, key, position = where.T
    position = position + np.tile(np.arange(depth), len(sequences))
    return noise_streams(seed, key, position, SAMPLE).reshape(-1, depth)


def _filters(sampling: SamplingParams) -> tuple[int, float, float]:
    """Top-k, top-p and min-p; no filter changes a greedy law."""
    return (sampling.top_k or _CANDIDATES, sampling.top_p, sampling.min_p) if sampling.temperature else _UNFILTERED
