"""The likeliest draft tokens of a drafter's distribution, in one pass over each row of logits.

``engine.speculation.drafters.proposal`` defines which tokens these are, and their acceptance probabilities.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.common.noise import SAMPLE
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
from kernels.cpu.sampling.blocks import BLOCK, block_maxima, num_blocks
from kernels.cpu.sampling.noise import gumbel_noise, noise_stream

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MIN_LOGITS_FOR_THREADS = 1 << 14
"""With fewer logits one thread is done before a second one has started."""


def rank_drafts(
    logits: Tensor,
    float_params: Floats,
    int_params: Ints,
    *,
    max_candidates: int,
    reach: float,
    noise: float,
    width: int,
) -> tuple[Ints, Floats]:
    """Return ``width`` tokens of each row of ``logits`` and their acceptance probabilities, the best first.

    ``logits``: ``[rows, vocab]``, contiguous. ``float_params`` ``[3, rows]``: temperature, top-p and min-p;
    ``int_params`` ``[4, rows]``: top-k, seed, key and position. Candidates are the tokens whose logits are within
    ``reach`` of the largest (times a temperature above 1), but only the ``max_candidates`` likeliest of them. ``noise``
    is the factor of the Gumbel noise in their scores.
    """
    rows = len(logits)
    tokens, probs = torch.empty(rows, width, dtype=torch.int64), torch.empty(rows, width, dtype=torch.float64)
    floats, ints = torch.from_numpy(float_params), torch.from_numpy(int_params)
    launch_rank_drafts(logits, floats, ints, 0, tokens, probs, max_candidates=max_candidates, reach=reach, noise=noise)
    return tokens.numpy(), probs.numpy()


def launch_rank_drafts(
    logits: Tensor,
    float_params: Tensor,
    int_params: Tensor,
    depth: int,
    tokens: Tensor,
    probs: Tensor,
    *,
    max_candidates: int,
    reach: float,
    noise: float,
) -> None:
    """Do ``rank_drafts`` by one kernel, into ``tokens`` and ``probs`` ``[rows, width]``, int64 and float64.

    ``depth`` is added to the positions. All tensors are contiguous.
    """
    rows, vocab = logits.shape
    threads = 1 if logits.numel() < _MIN_LOGITS_FOR_THREADS else torch.get_num_threads()
    scratch = empty(threads, 2 * (num_blocks(vocab) + 4 * max_candidates))
    _rank_drafts(
        logits,
        float_params,
        int_params,
        tokens,
        probs,
        scratch,
        rows,
        vocab,
        max_candidates,
        tokens.shape[1],
        reach,
        noise,
        depth,
        threads=threads,
    )


@kernel
def _rank_drafts(address: Any) -> None:
    a, thread, threads = read_arguments(address)
    rows, vocab, max_candidates, width = a[6], a[7], a[8], a[9]
    reach, noise, depth = as_float(a[10]), as_float(a[11]), a[12]
    float_params, int_params = int64_array(a[1], (3, rows)).view(np.float64), int64_array(a[2], (4, rows))
    tokens, probs = int64_array(a[3], (rows, width)), int64_array(a[4], (rows, width)).view(np.float64)
    blocks = (vocab + BLOCK - 1) // BLOCK
    scratch = a[5] + 8 * thread * (blocks + 4 * max_candidates)
    maxima = float32_array(scratch, (blocks,))
    lists = int64_array(scratch + 8 * blocks, (4, max_candidates))
    candidates, gaps = lists[0], lists[1].view(np.float64)
    scores, weights = lists[2].view(np.float64), lists[3].view(np.float64)
    first, end = split_range(rows, thread, threads)
    for row in range(first, end):
        for rank in range(width):
            tokens[row, rank], probs[row, rank] = 0, 0.0
        x = float32_array(a[0] + 4 * row * vocab, (vocab,))
        if not block_maxima(x, maxima):
            probs[row, 0] = np.nan
            continue
        temperature, top_p, min_p = float_params[0, row], float_params[1, row], float_params[2, row]
        top_k = int_params[0, row]
        top = np.float64(maxima.max())
        count = _collect_candidates(x, maxima, top, reach * max(1.0, temperature), candidates, gaps)
        if top_p < 1 or min_p > 0 or top_k < count:
            _sort(candidates[:count], gaps[:count])
            count = _count_kept(gaps[:count], weights, temperature, top_k, top_p, min_p)
        if temperature > 0:
            stream = noise_stream(int_params[1, row], int_params[2, row], int_params[3, row] + depth, SAMPLE)
            for i in range(count):
                scores[i] = gaps[i] + noise * temperature * gumbel_noise(stream, candidates[i])
        else:
            scores[:count] = gaps[:count]
        _write_best(candidates[:count], scores[:count], tokens[row], probs[row])


@function
def _collect_candidates(x: Any, maxima: Any, top: float, reach: float, candidates: Any, gaps: Any) -> int:
    """Write the candidates and the gaps between their logits and the largest (at most 0); return their number."""
    count, max_candidates = 0, len(candidates)
    smallest = np.float32(top - reach)
    for block in range(len(maxima)):
        if maxima[block] < smallest:
            continue
        for token in range(block * BLOCK, min((block + 1) * BLOCK, len(x))):
            if x[token] < smallest:
                continue
            gap = np.float64(x[token]) - top
            if count < max_candidates:
                candidates[count], gaps[count] = token, gap
                count += 1
                if count == max_candidates:
                    for root in range(max_candidates // 2 - 1, -1, -1):
                        _sift_down(candidates, gaps, root)
            elif gap > gaps[0]:
                candidates[0], gaps[0] = token, gap
                _sift_down(candidates, gaps, 0)
    return count


@function
def _sift_down(candidates: Any, gaps: Any, node: int) -> None:
    """Restore the order of a heap with its least gap at the root, after the entry of a node has changed."""
    token, gap = candidates[node], gaps[node]
    while True:
        child = 2 * node + 1
        if child >= len(gaps):
            break
        if child + 1 < len(gaps) and gaps[child + 1] < gaps[child]:
            child += 1
        if gap <= gaps[child]:
            break
        candidates[node], gaps[node] = candidates[child], gaps[child]
        node = child
    candidates[node], gaps[node] = token, gap


@function
def _sort(candidates: Any, gaps: Any) -> None:
    """Sort the candidates by descending logits."""
    for i in range(1, len(gaps)):
        token, gap, rank = candidates[i], gaps[i], i
        while rank > 0 and gaps[rank - 1] < gap:
            candidates[rank], gaps[rank] = candidates[rank - 1], gaps[rank - 1]
            rank -= 1
        candidates[rank], gaps[rank] = token, gap


@function
def _count_kept(gaps: Any, weights: Any, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """Return how many of the sorted candidates the filters keep. Top-p is of their mass, nearly that of all tokens."""
    count = min(top_k, len(gaps))
    total = 0.0
    for i in range(count):
        weights[i] = math.exp(gaps[i] / temperature)
        total += weights[i]
    mass = 0.0
    for i in range(count):
        if mass >= top_p * total or weights[i] < min_p or weights[i] == 0:
            return i
        mass += weights[i]
    return count


@function
def _write_best(candidates: Any, scores: Any, tokens: Any, probs: Any) -> None:
    """Write the candidates with the best scores, and their shares of the sum of ``exp(score)``."""
    best = scores.max()
    total = 0.0
    for i in range(len(scores)):
        total += math.exp(scores[i] - best)
    for rank in range(min(len(tokens), len(scores))):
        chosen = rank
        for i in range(rank + 1, len(scores)):
            if scores[i] > scores[chosen]:
                chosen = i
        token, score = candidates[chosen], scores[chosen]
        candidates[chosen], scores[chosen] = candidates[rank], scores[rank]
        tokens[rank], probs[rank] = token, math.exp(score - best) / total
