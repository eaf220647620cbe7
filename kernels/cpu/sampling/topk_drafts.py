"""The best guesses of a drafter's law, in one pass over each row (``engine.speculation.drafters.proposal`` says what
they are)."""

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
from kernels.cpu.sampling.noise import gumbel_of, stream_of
from kernels.cpu.sampling.sampler import BLOCK, block_maxima, blocks_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ALONE = 1 << 14
"""Logits that one thread looks at before two would have begun."""


def best(
    logits: Tensor, laws: Floats, places: Ints, *, most: int, reach: float, noise: float, width: int
) -> tuple[Ints, Floats]:
    """``width`` tokens of each row of ``logits`` ``[rows, vocab]``, contiguous, and their chances, the best first.

    ``laws``: ``[3, rows]`` temperature, top-p and min-p; ``places``: ``[4, rows]`` top-k, seed, key and position. Of
    the tokens whose logits are within ``reach`` of the largest one (times a temperature above 1) at most the ``most``
    likeliest are looked at; ``noise`` is the part of the noise that is counted.
    """
    rows = len(logits)
    tokens, chances = np.empty((rows, width), np.int64), np.empty((rows, width))
    found = torch.from_numpy(tokens), torch.from_numpy(chances)
    write_best(logits, torch.from_numpy(laws), torch.from_numpy(places), 0, *found, most=most, reach=reach, noise=noise)
    return tokens, chances


def write_best(
    logits: Tensor,
    laws: Tensor,
    places: Tensor,
    ahead: int,
    tokens: Tensor,
    chances: Tensor,
    *,
    most: int,
    reach: float,
    noise: float,
) -> None:
    """``best`` into ``tokens`` and ``chances`` ``[rows, width]``, int64 and float64: a launch that a tape may repeat
    for other laws and places. ``ahead`` is added to the positions. All are contiguous."""
    rows, vocab = logits.shape
    threads = 1 if logits.numel() < _ALONE else torch.get_num_threads()
    scratch = empty(threads, 2 * (blocks_of(vocab) + 4 * most))
    width = tokens.shape[1]
    _best(
        logits, laws, places, tokens, chances, scratch, rows, vocab, most, width, reach, noise, ahead, threads=threads
    )


@kernel
def _best(address: Any) -> None:
    a, thread, threads = read_arguments(address)
    rows, vocab, most, width = a[6], a[7], a[8], a[9]
    reach, part, ahead = as_float(a[10]), as_float(a[11]), a[12]
    laws, places = int64_array(a[1], (3, rows)).view(np.float64), int64_array(a[2], (4, rows))
    tokens, chances = int64_array(a[3], (rows, width)), int64_array(a[4], (rows, width)).view(np.float64)
    blocks = (vocab + BLOCK - 1) // BLOCK
    room = blocks + 4 * most
    scratch = a[5] + 8 * thread * room
    maxima = float32_array(scratch, (blocks,))
    lists = int64_array(scratch + 8 * blocks, (4, most))
    found, gaps = lists[0], lists[1].view(np.float64)
    noisy, weights = lists[2].view(np.float64), lists[3].view(np.float64)
    first, end = split_range(rows, thread, threads)
    for row in range(first, end):
        for rank in range(width):
            tokens[row, rank], chances[row, rank] = 0, 0.0
        x = float32_array(a[0] + 4 * row * vocab, (vocab,))
        if not block_maxima(x, maxima):
            chances[row, 0] = np.nan
            continue
        temperature = laws[0, row]
        top = np.float64(maxima.max())
        count = _likeliest(x, maxima, top, reach * max(1.0, temperature), found, gaps)
        if laws[1, row] < 1 or laws[2, row] > 0 or places[0, row] < count:
            _sort(found[:count], gaps[:count])
            count = _kept(gaps[:count], weights, temperature, places[0, row], laws[1, row], laws[2, row])
        if temperature > 0:
            stream = stream_of(places[1, row], places[2, row], places[3, row] + ahead, SAMPLE)
            for i in range(count):
                noisy[i] = gaps[i] + part * temperature * gumbel_of(stream, found[i])
        else:
            noisy[:count] = gaps[:count]
        _rank(found[:count], noisy[:count], tokens[row], chances[row])


@function
def _likeliest(x: Any, maxima: Any, top: float, reach: float, found: Any, gaps: Any) -> int:
    """Writes the tokens that are looked at and their logits minus the largest; answers how many."""
    count, most = 0, len(found)
    least = np.float32(top - reach)
    for block in range(len(maxima)):
        if maxima[block] < least:
            continue
        for token in range(block * BLOCK, min((block + 1) * BLOCK, len(x))):
            if x[token] < least:
                continue
            gap = np.float64(x[token]) - top
            if count < most:
                found[count], gaps[count] = token, gap
                count += 1
                if count == most:
                    for root in range(most // 2 - 1, -1, -1):
                        _sift(found, gaps, root)
            elif gap > gaps[0]:
                found[0], gaps[0] = token, gap
                _sift(found, gaps, 0)
    return count


@function
def _sift(found: Any, gaps: Any, node: int) -> None:
    """Lets the entry sink to its place in a heap whose least is at the root."""
    token, gap = found[node], gaps[node]
    while True:
        child = 2 * node + 1
        if child >= len(gaps):
            break
        if child + 1 < len(gaps) and gaps[child + 1] < gaps[child]:
            child += 1
        if gap <= gaps[child]:
            break
        found[node], gaps[node] = found[child], gaps[child]
        node = child
    found[node], gaps[node] = token, gap


@function
def _sort(found: Any, gaps: Any) -> None:
    """By falling logits."""
    for i in range(1, len(gaps)):
        token, gap, place = found[i], gaps[i], i
        while place > 0 and gaps[place - 1] < gap:
            found[place], gaps[place] = found[place - 1], gaps[place - 1]
            place -= 1
        found[place], gaps[place] = token, gap


@function
def _kept(gaps: Any, weights: Any, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """How many of the sorted tokens the filters keep; top-p is that of these, nearly the law's."""
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
def _rank(found: Any, scores: Any, tokens: Any, chances: Any) -> None:
    """Writes the best tokens and their shares of the scores' exponentials."""
    best = scores.max()
    total = 0.0
    for i in range(len(scores)):
        total += math.exp(scores[i] - best)
    for rank in range(min(len(tokens), len(scores))):
        chosen = rank
        for i in range(rank + 1, len(scores)):
            if scores[i] > scores[chosen]:
                chosen = i
        token, score = found[chosen], scores[chosen]
        found[chosen], scores[chosen] = found[rank], scores[rank]
        tokens[rank], chances[rank] = token, math.exp(score - best) / total
