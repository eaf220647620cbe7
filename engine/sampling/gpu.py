"""Sampling on a GPU, the counterpart of ``logits_processors`` and ``sampler``.

The host does not wait for the samples; the next step takes the tokens on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device
from engine.protocol.types import SamplingParams
from engine.sampling.grammar import Words
from engine.sampling.logits_processors import (
    Ints,
    LogitsRow,
    Penalties,
    forbidden_by_row,
    masks_by_row,
    penalties_by_row,
)
from engine.sampling.sampler import Array
from engine.sampling.samples import DeviceSamples, Samples
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.sampling import sampling

_MASKED_ROWS = 64
"""Maximum number of rows whose masks are spread to a word for each token at once, which takes three times the memory of
the logits."""
_NO_PENALTIES = Penalties(SamplingParams(), ())


def sample_on_gpu(
    logits: Tensor, logits_rows: Sequence[LogitsRow], params: SamplingTensors[Array], noise_keys: NoiseKeys[Array]
) -> Samples:
    """Sample one token per row of ``logits`` on a GPU; a ``Sampler``."""
    apply_logits_processors_on_gpu(logits, logits_rows)
    rows = len(logits)
    columns = to_device(pack_columns(params, noise_keys, rows), logits.device)[:, :rows]
    return DeviceSamples(launch_sampling(logits, columns))


def num_columns(rows: int) -> int:
    """Return the width of ``pack_columns`` for so many rows.

    It is an even number: each column then begins at a multiple of 16 bytes, and the kernel is compiled once.
    """
    return rows + rows % 2


def pack_columns(params: SamplingTensors[Array], noise_keys: NoiseKeys[Array], rows: int) -> Tensor:
    """Return sampling parameters and noise keys as int64 ``[7, num_columns(rows)]``, with the bits of the floats.

    Rows behind those of the parameters are padding, and their parameters 0.
    """
    packed, count = np.zeros((7, num_columns(rows)), np.int64), len(params.temperature)
    floats = packed[:3].view(np.float64)
    floats[0, :count], floats[1, :count], floats[2, :count] = params.temperature, params.top_p, params.min_p
    for index, column in enumerate((params.top_k, *noise_keys), 3):
        packed[index, :count] = column
    return torch.from_numpy(packed)


def launch_sampling(logits: Tensor, columns: Tensor) -> Tensor:
    """Sample one token per row on the device, without waiting. ``columns``: of ``pack_columns``, ``[7, rows]``.

    Returns int64 ``[2, rows]``: tokens, and the bits of their float64 log-probabilities.
    """
    temperature, top_p, min_p = columns[:3].view(torch.float64)
    top_k, seed, key, position = columns[3:]
    tokens, logprobs = sampling.sample(
        logits, SamplingTensors(temperature, top_p, min_p, top_k), NoiseKeys(seed, key, position)
    )
    return torch.stack((tokens, logprobs.view(torch.int64)))


def apply_logits_processors_on_gpu(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Apply the logits processors to ``logits`` ``[rows, vocab]`` on a GPU, in place."""
    penalties, forbidden, masks = penalties_by_row(rows), forbidden_by_row(rows), masks_by_row(rows)
    if penalties or forbidden:
        sampling.apply_penalties(logits, _penalty_tensors(len(logits), penalties, forbidden, logits.device))
    if masks:
        restrict_on_gpu(logits, masks)


def restrict_on_gpu(logits: Tensor, masks: Mapping[int, Words]) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in some rows of ``[rows, vocab]``, in place.

    One bit for each token is copied to the GPU.
    """
    words = to_device(torch.from_numpy(np.stack(list(masks.values()))), logits.device)
    rows = to_device(torch.tensor(list(masks)), logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    for start in range(0, len(rows), _MASKED_ROWS):
        some = rows[start : start + _MASKED_ROWS]
        bits = words[start : start + _MASKED_ROWS, :, None] >> shifts & 1
        allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
        logits[some] = logits[some].masked_fill(~allowed, -math.inf)


def _penalty_tensors(
    num_rows: int, penalties: Mapping[int, Penalties], forbidden: Mapping[int, Ints], device: torch.device
) -> sampling.PenaltyTensors:
    starts = np.zeros(num_rows + 1, np.int64)
    settings = np.tile(np.array([1, 0, 0], np.float32), (num_rows, 1))
    tokens, bias, seen, counts = [], [], [], []
    for row in sorted(penalties.keys() | forbidden.keys()):
        penalty, never = penalties.get(row, _NO_PENALTIES), forbidden.get(row, np.empty(0, np.int64))
        added = np.setdiff1d(never, penalty.tokens)
        tokens += [penalty.tokens, added]
        bias += [np.where(np.isin(penalty.tokens, never), np.float32(-np.inf), penalty.bias)]
        bias += [np.full(len(added), -np.inf, np.float32)]
        seen += [penalty.seen, np.zeros(len(added), np.bool_)]
        counts += [penalty.counts, np.zeros(len(added), np.float32)]
        settings[row] = penalty.repetition, penalty.frequency, penalty.presence
        starts[row + 1] = penalty.size + len(added)
    arrays = (starts.cumsum(), *map(np.concatenate, (tokens, bias, seen, counts)), settings)
    return sampling.PenaltyTensors(*(to_device(torch.from_numpy(array), device) for array in arrays))
