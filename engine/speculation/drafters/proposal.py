"""Sampling of draft tokens from a drafter's logits, with the branch's own noise.

A draft token is sampled with the noise that the branch's own sample will have, for the reason in
``engine.speculation``: it is the argmax of the logits over the temperature plus Gumbel noise, and the runners-up of
that argmax are the best other candidates for a tree (top-k with shared noise). Only the likeliest tokens are
considered: others are hardly ever sampled, and accepted even less often.

``kernels.cpu.sampling.topk_drafts`` does this for logits on the host, ``kernels.sampling.draft_tree`` on a device.

A drafter is less accurate than the target, so its distribution is flatter, and the target's sample depends less on the
noise than the drafter's would: so the noise is weighted (``NOISE``). Of the tokens that the bundled ``policy-large``
samples at temperatures from 0.5 to 1.3, the draft model then predicts 0.4 to 2.3 percentage points more, and the
policy, which is hardly flatter, at most 0.6 fewer. The acceptance probability of a draft token is its share of
``exp(logit + NOISE * temperature * noise)``, as if the drafter's error were noise of temperature 1; measured with the
draft model, it is right to within a few hundredths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device
from engine.protocol.types import SamplingParams
from engine.sampling.gpu import apply_logits_processors_on_gpu
from engine.sampling.logits_processors import apply_logits_processors
from engine.sampling.sampler import Floats, Ints
from engine.scheduler.sequence import GenerateSequence
from kernels.common.draft_trees import CandidateRules
from kernels.sampling.draft_tree import rank_drafts as rank_on_device

NOISE = 0.75
"""Weight of the noise; with 1 all draft tokens of a drafter that equals the target are accepted."""
_CANDIDATES = 64
"""Maximum number of candidates of a distribution."""
_REACH = 12.0
"""Maximum distance of a candidate's logit from the largest, over the temperature if that is above 1: all others
together are sampled less than once in a thousand times."""


class _Rows(NamedTuple):
    """Sampling parameters of rows of logits."""

    float_params: Floats
    """``[3, rows]`` temperature, top-p and min-p."""
    int_params: Ints
    """``[4, rows]`` top-k, seed, key and position."""


class DraftSampler:
    """Samples draft tokens for some branches."""

    def __init__(self, sequences: Sequence[GenerateSequence]) -> None:
        self.sequences = sequences
        self.has_processors = any(sequence.has_logits_processors for sequence in sequences)
        """True if a request has logits processors."""
        self.float_params: Floats = np.array([_float_params(s.sampling) for s in sequences]).T
        """``[3, branches]`` temperature, top-p and min-p."""
        self.int_params: Ints = np.array(
            [(_top_k(s.sampling), s.seed, s.key, len(s.tokens)) for s in sequences], np.int64
        ).T
        """``[4, branches]`` top-k, seed, key and the position of the first draft token."""

    def move(self) -> None:
        """Update the positions after the branches' tokens changed."""
        self.int_params[3] = [len(sequence.tokens) for sequence in self.sequences]

    def best(
        self,
        logits: Tensor,
        branches: Ints,
        ahead: Ints,
        width: int,
        paths: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Ints, Floats]:
        """Return draft tokens and their acceptance probabilities, ``[rows, width]``, the best first.

        ``logits`` ``[rows, vocab]`` float32 may be changed. ``branches``, ``ahead``: ``[rows]`` branch of each row, and
        number of draft tokens before the one to sample. ``paths``: these draft tokens, for the penalties; without them
        penalties do not count them. A probability is 0 if the branch's filters exclude the token or it is no candidate,
        and NaN if the logits are not finite.
        """
        if self.has_processors:
            self._change(logits, branches, ahead, paths)
        # Contiguous, row by row.
        rows = _Rows(self.float_params.take(branches, axis=1), self.int_params.take(branches, axis=1))
        rows.int_params[3] += ahead
        if logits.is_cuda:
            return _best_on_device(logits, rows, width)
        from kernels.cpu.sampling.topk_drafts import rank_drafts

        return rank_drafts(
            logits.contiguous(), *rows, max_candidates=_CANDIDATES, reach=_REACH, noise=NOISE, width=width
        )

    def _change(self, logits: Tensor, branches: Ints, ahead: Ints, paths: Sequence[Sequence[int]] | None) -> None:
        """Apply the logits processors of the branches' requests."""
        logits_rows = [
            self.sequences[branch].logits_row(paths[row] if paths else (), far)
            for row, (branch, far) in enumerate(zip(branches.tolist(), ahead.tolist(), strict=True))
        ]
        apply = apply_logits_processors_on_gpu if logits.is_cuda else apply_logits_processors
        apply(logits, logits_rows)


def write_best(
    logits: Tensor, float_params: Tensor, int_params: Tensor, ahead: int, tokens: Tensor, probs: Tensor
) -> None:
    """Write ``DraftSampler.best`` of ``logits`` ``[rows, vocab]`` to ``tokens`` and ``probs``, in one kernel.

    ``tokens``, ``probs``: ``[rows, width]`` int64 and float64.
    ``float_params`` ``[3, rows]`` and ``int_params`` ``[4, rows]``: those of the branches, a row for each. ``ahead``:
    number of draft tokens before these. All are contiguous."""
    from kernels.cpu.sampling.topk_drafts import launch_rank_drafts

    launch_rank_drafts(
        logits, float_params, int_params, ahead, tokens, probs, max_candidates=_CANDIDATES, reach=_REACH, noise=NOISE
    )


def _best_on_device(logits: Tensor, rows: _Rows, width: int) -> tuple[Ints, Floats]:
    """Return ``DraftSampler.best`` for logits on a device, by one copy to the host."""
    device = logits.device
    floats, ints = (to_device(torch.from_numpy(params), device) for params in rows)
    ahead = torch.zeros(len(logits), dtype=torch.int64, device=device)
    tokens, probs = rank_on_device(logits, floats, ints, ahead, width, candidate_rules())
    both = torch.stack((tokens, probs.view(torch.int64))).cpu().numpy()
    return both[0], both[1].view(np.float64)


def candidate_rules() -> CandidateRules:
    """Return the candidates of a distribution, for kernels on a device."""
    return CandidateRules(_CANDIDATES, _REACH, NOISE)


def _float_params(sampling: SamplingParams) -> tuple[float, float, float]:
    """Return temperature, top-p and min-p; filters do not apply to greedy sampling."""
    temperature = sampling.temperature
    return (temperature, sampling.top_p, sampling.min_p) if temperature else (0.0, 1.0, 0.0)


def _top_k(sampling: SamplingParams) -> int:
    return min(sampling.top_k, _CANDIDATES) if sampling.temperature and sampling.top_k else _CANDIDATES
