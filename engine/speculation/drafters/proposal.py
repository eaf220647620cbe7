"""What a drafter guesses, given the logits of its own law for the next token: what the branch would draw from that law.

A guess is made with the very noise that the branch's own draw will have (``engine.speculation`` says why): it is the
argmax of the law's logits over the temperature plus Gumbel noise, and the runners-up of that argmax are the best other
candidates for a tree (top-k with shared noise). Only the likeliest tokens of the law are looked at: what lies below is
hardly ever drawn, and guessing it right even less often.

``kernels.cpu.sampling.topk_drafts`` does this for logits on the host. What follows here is for logits on a device: it
takes the largest there, and the host sees no others.

A drafter knows less than the target, so its law is flatter, and the target's draw depends less on the noise than its
own would: the noise is counted in part (``NOISE``). Of what the bundled ``policy-large`` draws at temperatures from 0.5
to 1.3, the draft model then guesses 0.4 to 2.3 of a hundred tokens more right, and the policy, which is hardly flatter,
at most 0.6 fewer. The chance of a guess is its share of ``exp(logit + NOISE * temperature * noise)``: as if what the
drafter does not know were noise of the size that a temperature of 1 has. With the draft model that is right to some
hundredths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.protocol.types import SamplingParams
from engine.sampling.gpu import apply_logits_processors_on_gpu
from engine.sampling.logits_processors import apply_logits_processors
from engine.sampling.truncation import Floats, Ints
from engine.scheduler.sequence import GenerateSequence
from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams

NOISE = 0.75
"""The part of the noise that is counted; with 1 a drafter that is the target is always right."""
_CANDIDATES = 64
"""Likeliest tokens of a law that are looked at, at most."""
_REACH = 12.0
"""Only those whose logits, over the temperature if that is above 1, are so close to the largest: the others together
are hardly drawn once in a thousand times."""


class _Rows(NamedTuple):
    """What rows of logits are guessed from, beside these."""

    laws: Floats
    """``[3, rows]`` temperature, top-p and min-p."""
    places: Ints
    """``[4, rows]`` top-k, seed, key and position."""


class DraftSampler:
    """The best guesses for some branches."""

    def __init__(self, sequences: Sequence[GenerateSequence]) -> None:
        self.sequences = sequences
        self.changed = any(sequence.has_logits_processors for sequence in sequences)
        """Whether a request changes logits."""
        self.laws: Floats = np.array([_law(s.sampling) for s in sequences]).T
        """``[3, branches]`` temperature, top-p and min-p."""
        self.places: Ints = np.array(
            [(_top_k(s.sampling), s.seed, s.key, len(s.tokens)) for s in sequences], np.int64
        ).T
        """``[4, branches]`` top-k, seed, key and the position of the first guess."""

    def move(self) -> None:
        """The branches have other tokens than before."""
        self.places[3] = [len(sequence.tokens) for sequence in self.sequences]

    def best(
        self,
        logits: Tensor,
        branches: Ints,
        ahead: Ints,
        width: int,
        paths: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Ints, Floats]:
        """DraftSampler for rows of a drafter's ``logits`` ``[rows, vocab]`` float32, which it may change.

        ``branches``, ``ahead``: ``[rows]`` whose row it is, and how many guesses lie before the one that is made.
        ``paths``: these guesses, which penalties count; without them they do not. Returns tokens and the chances that
        they are right, ``[rows, width]``, the best first. A chance is 0 where the branch's filters leave the token out,
        or nobody looked at it, and not a number where the logits are not finite.
        """
        if self.changed:
            self._change(logits, branches, ahead, paths)
        # As they lie in memory: rows one after the other.
        rows = _Rows(self.laws.take(branches, axis=1), self.places.take(branches, axis=1))
        rows.places[3] += ahead
        if logits.is_cuda:
            return best_with_numpy(logits, rows, width)
        from kernels.cpu.sampling.topk_drafts import rank_drafts

        return rank_drafts(
            logits.contiguous(), *rows, max_candidates=_CANDIDATES, reach=_REACH, noise=NOISE, width=width
        )

    def _change(self, logits: Tensor, branches: Ints, ahead: Ints, paths: Sequence[Sequence[int]] | None) -> None:
        """Applies what requests change in their branches' logits."""
        changed = [
            self.sequences[branch].logits_row(paths[row] if paths else (), far)
            for row, (branch, far) in enumerate(zip(branches.tolist(), ahead.tolist(), strict=True))
        ]
        apply = apply_logits_processors_on_gpu if logits.is_cuda else apply_logits_processors
        apply(logits, changed)


def write_best(logits: Tensor, laws: Tensor, places: Tensor, ahead: int, tokens: Tensor, chances: Tensor) -> None:
    """Write ``DraftSampler.best`` of ``logits`` ``[rows, vocab]`` to ``tokens`` and ``chances``, in one kernel.

    ``tokens``, ``chances``: ``[rows, width]`` int64 and float64.
    ``laws`` ``[3, rows]`` and ``places`` ``[4, rows]``: those of the branches, a row for each. ``ahead``: how many
    guesses lie before these. All are contiguous.
    """
    from kernels.cpu.sampling.topk_drafts import launch_rank_drafts

    launch_rank_drafts(
        logits, laws, places, ahead, tokens, chances, max_candidates=_CANDIDATES, reach=_REACH, noise=NOISE
    )


def best_with_numpy(logits: Tensor, rows: _Rows, width: int) -> tuple[Ints, Floats]:
    """``DraftSampler.best`` of logits on a device."""
    top = logits.topk(min(_CANDIDATES, logits.shape[1]))
    tokens, values = top.indices.cpu().numpy(), top.values.cpu().numpy()
    temperature, _, _ = rows.laws[..., None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        gaps = values - values[:, :1].astype(np.float64)
        gaps = np.where(gaps < -_REACH * np.maximum(temperature, 1), -np.inf, gaps)
        _, seed, key, position = rows.places
        noise = gumbel_noise(noise_streams(seed, key, position, SAMPLE)[:, None], tokens)
        scores = np.where(_kept(gaps, rows), gaps + NOISE * temperature * noise, -np.inf)
        scores[~np.isfinite(values[:, 0])] = np.nan
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :width]
    chosen = np.arange(len(scores))[:, None]
    return tokens[chosen, order], weights[chosen, order]


def _kept(gaps: Floats, rows: _Rows) -> npt.NDArray[np.bool_]:
    """Which candidates the filters keep; top-p is that of the candidates, nearly the law's.

    ``gaps``: ``[rows, candidates]``, the logits minus the first, descending.
    """
    temperature, top_p, min_p = rows.laws[..., None]
    first = np.arange(gaps.shape[1]) < rows.places[0][:, None]
    weights = np.exp(gaps / np.where(temperature > 0, temperature, 1)) * first
    mass = weights.cumsum(axis=1)
    kept: npt.NDArray[np.bool_] = (mass - weights < top_p * mass[:, -1:]) & (weights >= min_p) & (weights > 0)
    return np.where((top_p >= 1) & (min_p <= 0), first, kept)


def _law(sampling: SamplingParams) -> tuple[float, float, float]:
    """Temperature, top-p and min-p; no filter changes a greedy law."""
    temperature = sampling.temperature
    return (temperature, sampling.top_p, sampling.min_p) if temperature else (0.0, 1.0, 0.0)


def _top_k(sampling: SamplingParams) -> int:
    return min(sampling.top_k, _CANDIDATES) if sampling.temperature and sampling.top_k else _CANDIDATES
