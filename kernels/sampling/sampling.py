"""Sampling tokens where the logits are: without copying them to the host, and without waiting for them.

The distribution is that of ``engine.sampling.sampler``, which samples on the CPU: the same logits, parameters and noise
keys give the same tokens. Only if the edge of a nucleus lies within float32 rounding of a token (about one sample in a
million) may the two keep different tokens. Without a GPU plain torch does the same by sorting, in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors


class PenaltyTensors(NamedTuple):
    """Biases and penalties of some tokens of each row (``engine.sampling.logits_processors``).

    The tokens of all rows lie one row after the other, ``[n]`` in all; a row has a token at most once.
    """

    starts: Tensor
    """int64 ``[rows + 1]``: the index of each row's first token."""
    tokens: Tensor
    """int64 ``[n]``."""
    bias: Tensor
    """float32 ``[n]``, added first; minus infinity forbids a token."""
    seen: Tensor
    """bool ``[n]``: True if the repetition penalty applies."""
    counts: Tensor
    """float32 ``[n]``: how often the token was generated."""
    settings: Tensor
    """float32 ``[rows, 3]``: repetition, frequency and presence penalty; 1, 0 and 0 are off."""


def apply_penalties(logits: Tensor, penalties: PenaltyTensors) -> None:
    """Apply biases and penalties to float32 ``logits`` ``[rows, vocab]``, in place. The last axis has stride 1."""
    if logits.is_cuda:
        from kernels.triton import sampling as on_gpu

        on_gpu.apply_penalties(logits, *penalties)
        return
    rows = torch.repeat_interleave(penalties.starts.diff())
    repetition, frequency, presence = penalties.settings[rows].unbind(1)
    values = logits[rows, penalties.tokens] + penalties.bias
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(penalties.seen, repeated, values)
    values -= frequency * penalties.counts + presence * (penalties.counts > 0)
    logits[rows, penalties.tokens] = values


def sample(logits: Tensor, params: SamplingTensors[Tensor], noise_keys: NoiseKeys[Tensor]) -> tuple[Tensor, Tensor]:
    """Sample one token per row from float32 ``logits`` ``[rows, vocab]``, whose last axis has stride 1.

    Returns int64 token ids and float64 log-probabilities under the distribution that was sampled from (greedy: that of
    temperature 1), ``[rows]`` each. Nothing waits for the device, so nothing is raised: the token is -1 if the largest
    logit is not finite or any is NaN.
    """
    if logits.is_cuda:
        from kernels.triton import sampling as on_gpu

        return on_gpu.sample(logits, *params, *noise_keys, SAMPLE)
    vocab = logits.shape[1]
    top = logits.amax(dim=1, keepdim=True)
    is_valid = top.isfinite().squeeze(1) & ~logits.isnan().any(dim=1)
    is_greedy = (params.temperature <= 0)[:, None]
    temperature = torch.where(is_greedy, 1.0, params.temperature[:, None])
    scores = (logits.double() - top) / temperature
    kept = is_greedy | (scores >= _smallest_kept(scores, params))
    streams = noise_streams(noise_keys.seed.numpy(), noise_keys.key.numpy(), noise_keys.position.numpy(), SAMPLE)
    noise = torch.from_numpy(gumbel_noise(streams[:, None], torch.arange(vocab).numpy()))
    noisy = torch.where(kept, torch.where(is_greedy, scores, scores + noise), -torch.inf)
    tokens = noisy.argmax(dim=1)
    log_total = torch.where(kept, scores, -torch.inf).logsumexp(dim=1)
    logprobs = scores.gather(1, tokens[:, None]).squeeze(1) - log_total
    return torch.where(is_valid, tokens, -1), torch.where(is_valid, logprobs, torch.nan)


def _smallest_kept(scores: Tensor, params: SamplingTensors[Tensor]) -> Tensor:
    """Return the smallest score that each row keeps, ``[rows, 1]``."""
    vocab = scores.shape[1]
    best = scores.sort(dim=1, descending=True).values
    count = torch.where((params.top_k > 0) & (params.top_k < vocab), params.top_k, vocab)[:, None]
    mass = torch.where(torch.arange(vocab) < count, best.exp(), 0).cumsum(dim=1)
    inside = (mass[:, :-1] < params.top_p[:, None] * mass[:, -1:]) | (params.top_p[:, None] >= 1)
    count = torch.minimum(count, 1 + inside.sum(dim=1, keepdim=True))
    smallest = best.gather(1, count - 1)
    return torch.maximum(smallest, params.min_p[:, None].log())
