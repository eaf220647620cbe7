"""Drawing tokens where the logits are: without copying them to the host, and without waiting for them.

The law is that of ``engine.sampling.sampler``, which draws on the CPU: the same logits, parameters and coordinates give
the same tokens. Only where the edge of a nucleus lies within float32 rounding of a token (about one draw in a million)
may the two see another nucleus. Without a GPU plain torch does the same by sorting, in float64: the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams


class Changes(NamedTuple):
    """Tokens whose logits requests change (``engine.sampling.penalties``), row by row. A row names a token at most
    once."""

    starts: Tensor
    """int64 ``[rows + 1]``: where each row's tokens start in the other tensors."""
    tokens: Tensor
    """int64 ``[n]``."""
    bias: Tensor
    """float32 ``[n]``, added first; minus infinity forbids a token."""
    seen: Tensor
    """bool ``[n]``: whether the repetition penalty concerns it."""
    counts: Tensor
    """float32 ``[n]``: how often it was generated."""
    settings: Tensor
    """float32 ``[rows, 3]``: repetition, frequency and presence penalty; 1, 0 and 0 are off."""


class Laws(NamedTuple):
    """The sampling parameters of each row, ``[rows]``."""

    temperature: Tensor
    """float64; 0 is greedy."""
    top_p: Tensor
    """float64; 1 is off."""
    min_p: Tensor
    """float64; 0 is off."""
    top_k: Tensor
    """int64; 0 is off."""


class Coordinates(NamedTuple):
    """Where each row's noise comes from, int64 ``[rows]``."""

    seed: Tensor
    key: Tensor
    position: Tensor


def change(logits: Tensor, changes: Changes) -> None:
    """Applies bias and penalties to float32 logits ``[rows, vocab]``, in place. A row's logits stand together."""
    if logits.is_cuda:
        from kernels.triton import sampling as on_gpu

        on_gpu.change(logits, *changes)
        return
    rows = torch.repeat_interleave(changes.starts.diff())
    repetition, frequency, presence = changes.settings[rows].unbind(1)
    values = logits[rows, changes.tokens] + changes.bias
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(changes.seen, repeated, values)
    values -= frequency * changes.counts + presence * (changes.counts > 0)
    logits[rows, changes.tokens] = values


def draw(logits: Tensor, laws: Laws, where: Coordinates) -> tuple[Tensor, Tensor]:
    """Draws one token per row from float32 logits ``[rows, vocab]``. A row's logits stand together.

    Returns int64 token ids and float64 log-probabilities under the law that they were drawn from (greedy: of
    temperature 1), ``[rows]`` each. Nobody waits, so nothing can be raised: where the largest logit is not finite or
    any is not a number, the token is -1.
    """
    if logits.is_cuda:
        from kernels.triton import sampling as on_gpu

        return on_gpu.draw(logits, *laws, *where, SAMPLE)
    vocab = logits.shape[1]
    top = logits.amax(dim=1, keepdim=True)
    sound = top.isfinite().squeeze(1) & ~logits.isnan().any(dim=1)
    greedy = (laws.temperature <= 0)[:, None]
    temperature = torch.where(greedy, 1.0, laws.temperature[:, None])
    scores = (logits.double() - top) / temperature
    kept = greedy | (scores >= _smallest_kept(scores, laws))
    streams = noise_streams(where.seed.numpy(), where.key.numpy(), where.position.numpy(), SAMPLE)
    noise = torch.from_numpy(gumbel_noise(streams[:, None], torch.arange(vocab).numpy()))
    noisy = torch.where(kept, torch.where(greedy, scores, scores + noise), -torch.inf)
    tokens = noisy.argmax(dim=1)
    total = torch.where(kept, scores, -torch.inf).logsumexp(dim=1)
    logprobs = scores.gather(1, tokens[:, None]).squeeze(1) - total
    return torch.where(sound, tokens, -1), torch.where(sound, logprobs, torch.nan)


def _smallest_kept(scores: Tensor, laws: Laws) -> Tensor:
    """The smallest score that each row keeps, ``[rows, 1]``."""
    vocab = scores.shape[1]
    best = scores.sort(dim=1, descending=True).values
    count = torch.where((laws.top_k > 0) & (laws.top_k < vocab), laws.top_k, vocab)[:, None]
    mass = torch.where(torch.arange(vocab) < count, best.exp(), 0).cumsum(dim=1)
    inside = (mass[:, :-1] < laws.top_p[:, None] * mass[:, -1:]) | (laws.top_p[:, None] >= 1)
    count = torch.minimum(count, 1 + inside.sum(dim=1, keepdim=True))
    smallest = best.gather(1, count - 1)
    return torch.maximum(smallest, laws.min_p[:, None].log())
