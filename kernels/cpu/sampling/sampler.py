"""Sampling from logits on the CPU in one pass over each row (``engine.sampling.sampler`` defines the distribution).

The pass runs an exponential race. With weights ``w`` (1 for the likeliest token) and uniforms ``u`` each token arrives
at the time ``-log(u) / w``, and the first one to arrive is the sample. The pass keeps the earliest time ``t`` so far.
Since ``-log(u) >= 1 - u``, only a token with ``1 - u <= t * w`` can arrive before it. That comparison is made in
float32, with room for its rounding; about ten tokens of a row pass it, and only these need logarithms, in float64.

If the scores of the first two tokens are so close that the logarithm's last bits could decide, the row is left to
``resolve_near_ties``, which uses NumPy's logarithm as ``kernels.common.noise`` does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
from kernels.common.sampling_tensors import NoiseKeys, SamplingTensors
from kernels.cpu.runtime.kernel import (
    as_float,
    float32_array,
    function,
    int64_array,
    kernel,
    read_arguments,
    split_range,
)
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.sampling.blocks import BLOCK, block_maxima, num_blocks, weigh, weigh_block
from kernels.cpu.sampling.noise import gumbel_noise as token_gumbel_noise
from kernels.cpu.sampling.noise import noise_stream, race_bits
from kernels.cpu.sampling.threshold import find_smallest_kept

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MIN_LOGITS_FOR_THREADS = 1 << 14
"""With fewer logits one thread is done before a second one has started."""
_NEAR_TIE = 1e-9
"""Difference of two scores: more than their rounding, and less than ``_ROUNDING``."""
_ROUNDING = 1e-3
"""More than the relative error of a float32 weight that matters: such a weight exceeds ``2**-53 / 37``, so its
exponent, three roundings relative to at most 41, is off by less than 1e-5."""
_LATEST = np.float32(40)
"""No token of weight 1 arrives later than ``-log(2**-53)``."""
_2_32 = np.float32(2.0**32)
_INVALID_TOKEN, _NEAR_TIE_TOKEN = -1, -2


def sample(logits: Tensor, params: SamplingTensors[Array], noise_keys: NoiseKeys[Array]) -> tuple[Ints, Floats]:
    """Sample a token from each row of float32 ``logits`` ``[rows, vocab]``.

    Returns token ids and log-probabilities, ``[rows]`` each. The token is -1 if the row's largest logit is not finite
    or any logit is NaN.
    """
    rows = logits.shape[0]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    threshold = np.full(rows, -np.inf)
    if params.min_p.any():
        threshold = min_p_threshold(params.temperature, params.min_p)
    float_params = np.array((params.temperature, params.top_p, threshold))
    int_params = np.array((params.top_k, *noise_keys))
    tokens, results = np.empty(rows, np.int64), np.empty((3, rows))
    launch_sampling(logits, *(torch.from_numpy(array) for array in (float_params, int_params, tokens, results)))
    return resolve_near_ties(logits, float_params, int_params, tokens, results)


def min_p_threshold(temperature: Floats, min_p: Floats) -> Floats:
    """Return the smallest logit that min-p keeps, relative to the largest one; minus infinity if it keeps all.

    Computed here because a kernel might round its multiplication and addition as one operation.
    """
    threshold = np.full(len(min_p), -np.inf)
    limited = min_p > 0
    threshold[limited] = temperature[limited] * np.log(min_p[limited])
    return threshold


def launch_sampling(logits: Tensor, float_params: Tensor, int_params: Tensor, tokens: Tensor, results: Tensor) -> None:
    """Write the ``tokens`` ``[rows]`` that are sampled from ``logits`` ``[rows, vocab]``, by one kernel.

    ``float_params`` ``[3, rows]`` float64: temperature, top-p and ``min_p_threshold``. ``int_params`` ``[4, rows]``
    int64: top-k, seed, key and position. ``results`` ``[3, rows]`` float64 gets the log-probability, the logarithm of
    the sum of weights and the smallest logit kept; ``resolve_near_ties`` reads them. All but the rows of ``logits`` are
    contiguous.
    """
    rows, vocab = logits.shape
    threads = 1 if rows == 1 or logits.numel() < _MIN_LOGITS_FOR_THREADS else torch.get_num_threads()
    scratch = empty(threads, vocab + num_blocks(vocab))
    _sample(
        logits,
        logits.stride(0),
        float_params,
        int_params,
        tokens,
        results,
        scratch,
        rows,
        vocab,
        _NEAR_TIE,
        threads=threads,
    )


def resolve_near_ties(
    logits: Tensor, float_params: Floats, int_params: Ints, tokens: Ints, results: Floats
) -> tuple[Ints, Floats]:
    """Return the tokens of ``launch_sampling`` and their log-probabilities, after sampling the rows that it left."""
    logprobs, log_total, smallest_kept = results
    if tokens.min() < 0:
        for row in np.flatnonzero(tokens == _NEAR_TIE_TOKEN).tolist():
            x = logits[row].numpy()
            kept = np.flatnonzero(x >= smallest_kept[row])
            scores = (x[kept].astype(np.float64) - x.max()) / float_params[0, row]
            seed, key, position = int_params[1:, [row]]
            winner = (scores + gumbel_noise(noise_streams(seed, key, position, SAMPLE), kept)).argmax()
            tokens[row], logprobs[row] = kept[winner], scores[winner] - log_total[row]
    return tokens, logprobs


@kernel
def _sample(address: Any) -> None:
    a, thread, threads = read_arguments(address)
    rows, vocab, near_tie = a[7], a[8], as_float(a[9])
    blocks = (vocab + BLOCK - 1) // BLOCK
    float_params, int_params = int64_array(a[2], (3, rows)).view(np.float64), int64_array(a[3], (4, rows))
    tokens, results = int64_array(a[4], (rows,)), int64_array(a[5], (3, rows)).view(np.float64)
    scratch = float32_array(a[6] + 4 * thread * (vocab + blocks), (vocab + blocks,))
    weights, maxima = scratch[:vocab], scratch[vocab:]
    first, end = split_range(rows, thread, threads)
    for row in range(first, end):
        x = float32_array(a[0] + 4 * row * a[1], (vocab,))
        if not block_maxima(x, maxima):
            tokens[row] = _INVALID_TOKEN
            continue
        top = maxima.max()
        temperature = float_params[0, row]
        if temperature <= 0:
            tokens[row], total = _take_first_maximum(x, maxima, top, weights)
            results[0, row] = -math.log(total)
            continue
        factor = np.float32(min(max(1 / temperature, 1e-37), 3e38))
        smallest_kept = max(
            find_smallest_kept(x, maxima, weights, top, factor, int_params[0, row], float_params[1, row]),
            min(top, _round_up(np.float64(top) + float_params[2, row])),
        )
        stream = noise_stream(int_params[1, row], int_params[2, row], int_params[3, row], SAMPLE)
        token, lead, total = _race(x, maxima, weights, top, factor, temperature, smallest_kept, stream)
        tokens[row] = token if lead > near_tie else _NEAR_TIE_TOKEN
        results[1, row], results[2, row] = math.log(total), smallest_kept
        results[0, row] = (np.float64(x[token]) - np.float64(top)) / temperature - results[1, row]


@function
def _round_up(value: float) -> Any:
    """Return the smallest float32 that is not less than a float64."""
    rounded = np.float32(value)
    return np.nextafter(rounded, np.float32(np.inf)) if rounded < value else rounded


@function
def _take_first_maximum(x: Any, maxima: Any, top: Any, weights: Any) -> Any:
    """Return the first of the likeliest tokens, and the sum of the weights."""
    total = weigh(x, top, np.float32(1), weights)
    block = 0
    while maxima[block] != top:
        block += 1
    token = block * BLOCK
    while x[token] != top:
        token += 1
    return token, total


@function
def _race(
    x: Any, maxima: Any, weights: Any, top: Any, factor: Any, temperature: float, smallest_kept: Any, stream: Any
) -> Any:
    """Return the token that arrives first, the lead of its score, and the sum of the weights of the tokens kept."""
    token, best, second, total = 0, -np.inf, -np.inf, 0.0
    limit = _LATEST * _2_32
    weights = weights[:BLOCK]
    for block in range(len(maxima)):
        if maxima[block] < smallest_kept:
            continue
        start = block * BLOCK
        logits = x[start : start + BLOCK]
        total += weigh_block(logits, top, factor, smallest_kept, weights)
        if not _any_candidate(weights, len(logits), stream, start, limit):
            continue
        for i in range(len(logits)):
            if logits[i] >= smallest_kept and race_bits(stream, start + i) <= _arrival_bound(weights[i], limit):
                score = (np.float64(logits[i]) - np.float64(top)) / temperature
                score += token_gumbel_noise(stream, start + i)
                if score > best:
                    token, best, second = start + i, score, best
                    limit = min(np.float32(math.exp(-best) * (1 + _ROUNDING)), _LATEST) * _2_32
                elif score > second:
                    second = score
    return token, best - second, total


@function
def _any_candidate(weights: Any, count: int, stream: Any, start: int, limit: Any) -> Any:
    """Return True if any token of a block may arrive before the earliest one so far."""
    is_any = np.int32(0)
    for i in range(count):
        is_any |= np.int32(race_bits(stream, start + i) <= _arrival_bound(weights[i], limit))
    return is_any != 0


@function
def _arrival_bound(weight: Any, limit: Any) -> Any:
    """Return the largest ``race_bits`` of a token that may arrive before ``limit``, ``2**32`` times a time."""
    return weight * limit + np.float32(4)
