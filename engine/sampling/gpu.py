"""Sampling on a GPU, the counterpart of ``penalties`` and ``sampler``.

The host synchronizes once per step, to copy tokens and log-probabilities together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device
from engine.protocol.types import EngineError
from engine.sampling.logits_processors import LogitsRow, forbidden_by_row, penalties_by_row
from engine.sampling.penalties import Ints, Penalties
from engine.sampling.sampler import Array, Floats
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.sampling import sampling


def sample_on_gpu(
    logits: Tensor, logits_rows: Sequence[LogitsRow], params: SamplingTensors[Array], noise_keys: NoiseKeys[Array]
) -> tuple[Ints, Floats]:
    """Sample one token per row of ``logits`` on a GPU; a ``Sampler``."""
    apply_logits_processors_on_gpu(logits, logits_rows)
    rows = len(logits)
    # An even number of columns: each row then begins at a multiple of 16 bytes, and the kernel is compiled once.
    packed = np.zeros((7, rows + rows % 2), np.int64)
    floats = packed[:3].view(np.float64)
    floats[0, :rows], floats[1, :rows], floats[2, :rows] = params.temperature, params.top_p, params.min_p
    for index, column in enumerate((params.top_k, *noise_keys), 3):
        packed[index, :rows] = column
    columns = to_device(torch.from_numpy(packed), logits.device)[:, :rows]
    temperature, top_p, min_p = columns[:3].view(torch.float64)
    top_k, seed, key, position = columns[3:]
    tokens, logprobs = sampling.sample(
        logits, SamplingTensors(temperature, top_p, min_p, top_k), NoiseKeys(seed, key, position)
    )
    drawn = torch.stack((tokens, logprobs.view(torch.int64))).cpu().numpy()
    if (drawn[0] < 0).any():
        raise EngineError("the model's logits are not finite")
    return drawn[0], drawn[1].view(np.float64)


def apply_logits_processors_on_gpu(logits: Tensor, rows: Sequence[LogitsRow]) -> None:
    """Apply bias, penalties and ``min_tokens`` to ``logits`` ``[rows, vocab]`` on a GPU, in place."""
    penalties, forbidden = penalties_by_row(rows), forbidden_by_row(rows)
    if penalties or forbidden:
        sampling.apply_penalties(logits, changes(len(logits), penalties, forbidden, logits.device))


def changes(
    rows: int, penalties: Mapping[int, Penalties], forbidden: Mapping[int, Ints], device: torch.device
) -> sampling.PenaltyTensors:
    """Return the tensors of ``sampling.apply_penalties``: penalties and forbidden tokens of each of ``rows`` rows."""
    sizes = np.zeros(rows, np.int64)
    settings = np.tile(np.array([1, 0, 0], np.float32), (rows, 1))
    tokens, bias, seen, counts = [], [], [], []
    for row in sorted(penalties.keys() | forbidden.keys()):
        one, never = penalties.get(row), forbidden.get(row, np.empty(0, np.int64))
        known = np.empty(0, np.int64)
        if one is not None:
            known, settings[row] = one.tokens, (one.repetition, one.frequency, one.presence)
            bias.append(np.where(np.isin(known, never), np.float32(-np.inf), one.bias))
            seen.append(one.seen)
            counts.append(one.counts)
        new = np.setdiff1d(never, known)
        tokens += [known, new]
        bias.append(np.full(len(new), -np.inf, np.float32))
        seen.append(np.zeros(len(new), np.bool_))
        counts.append(np.zeros(len(new), np.float32))
        sizes[row] = len(known) + len(new)
    return sampling.PenaltyTensors(
        starts=to_device(torch.from_numpy(np.concatenate(([0], sizes.cumsum()))), device),
        tokens=to_device(torch.from_numpy(np.concatenate(tokens)), device),
        bias=to_device(torch.from_numpy(np.concatenate(bias)), device),
        seen=to_device(torch.from_numpy(np.concatenate(seen)), device),
        counts=to_device(torch.from_numpy(np.concatenate(counts)), device),
        settings=to_device(torch.from_numpy(settings), device),
    )
