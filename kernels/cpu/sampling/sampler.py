"""Drawing tokens on the CPU in one pass over each row (``engine.sampling.sampler`` says what is drawn).

With weights ``w`` (1 for the likeliest token) and uniforms ``u`` every token arrives at the time ``-log(u) / w``, and
the first one wins. The pass keeps the time ``t`` of the first so far. Since ``-log(u) >= 1 - u``, only a token with
``1 - u <= t * w`` can come before it; that comparison is made in float32, with room for its rounding, and about ten
tokens of a row pass it. Theirs are the only logarithms, in float64.

Tokens that may differ in the last bits of their logarithms from NumPy's are not told apart here but there.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.common.noise import SAMPLE, gumbel_noise, noise_streams
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
from kernels.cpu.sampling.noise import gumbel_of, race_bits, stream_of
from kernels.cpu.simd.exp import exp32

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

BLOCK = 128
"""Tokens of a row that are summed in float32, and looked at again where one of them may win."""
_ALONE = 1 << 14
"""Logits that one thread draws from before two would have begun."""
_CLOSE = 1e-9
"""More than the rounding of a noisy score, and less than ``_ROUNDING``."""
_ROUNDING = 1e-3
"""More than the relative error of a float32 weight that matters: such a weight exceeds ``2**-53 / 37``, so its
exponent, three roundings relative to at most 41, is off by less than 1e-5."""
_LATEST = np.float32(40)
"""No token of weight 1 arrives later than ``-log(2**-53)``."""
_2_32 = np.float32(2.0**32)
_FEW = 32
"""Tokens that are sorted."""
_SHORTEST = np.float32(1e-30)
"""A first step that is no denormal, which the processor may take for 0."""
_ROUNDS = 16
"""Steps of regula falsi before it is bisection."""
_NAN, _CLOSE_CALL = -1, -2

_INFINITE = np.int32(0x7F800000)
_MINUS_INFINITE = np.int32(-0x7F800001)
_ORDER = np.int32(0x7FFFFFFF)
_31 = np.int32(31)


class Laws(Protocol):
    """See ``engine.sampling.sampler.Laws``."""

    @property
    def temperature(self) -> Floats: ...
    @property
    def top_p(self) -> Floats: ...
    @property
    def min_p(self) -> Floats: ...
    @property
    def top_k(self) -> Ints: ...


class Coordinates(Protocol):
    """See ``engine.sampling.sampler.Coordinates``."""

    @property
    def seed(self) -> Ints: ...
    @property
    def key(self) -> Ints: ...
    @property
    def position(self) -> Ints: ...


def draw(logits: Tensor, laws: Laws, where: Coordinates) -> tuple[Ints, Floats]:
    """See ``engine.sampling.sampler.sample``. Where a row's largest logit is not finite or any is not a number, its
    token is
    -1."""
    rows = logits.shape[0]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    reach = np.full(rows, -np.inf)
    if laws.min_p.any():
        reach = reach_of(laws.temperature, laws.min_p)
    settings = np.array((laws.temperature, laws.top_p, reach))
    places = np.array((laws.top_k, where.seed, where.key, where.position))
    tokens, found = np.empty(rows, np.int64), np.empty((3, rows))
    write_draws(logits, *(torch.from_numpy(array) for array in (settings, places, tokens, found)))
    return told_apart(logits, settings, places, tokens, found)


def reach_of(temperature: Floats, min_p: Floats) -> Floats:
    """How far below the largest logit min-p keeps tokens.

    Here and not in the kernel, where multiplication and addition may be one operation with one rounding.
    """
    reach = np.full(len(min_p), -np.inf)
    some = min_p > 0
    reach[some] = temperature[some] * np.log(min_p[some])
    return reach


def write_draws(logits: Tensor, settings: Tensor, places: Tensor, tokens: Tensor, found: Tensor) -> None:
    """Writes the ``tokens`` ``[rows]`` that are drawn from ``logits`` ``[rows, vocab]``, and what ``told_apart`` wants
    to know of them into ``found`` ``[3, rows]`` float64: a launch that a tape may repeat.

    ``settings`` ``[3, rows]`` float64: temperature, top-p and ``reach_of``; ``places`` ``[4, rows]`` int64: top-k,
    seed, key and position. All but the rows of ``logits`` are contiguous.
    """
    rows, vocab = logits.shape
    threads = 1 if rows == 1 or logits.numel() < _ALONE else torch.get_num_threads()
    scratch = empty(threads, vocab + blocks_of(vocab))
    _draw(logits, logits.stride(0), settings, places, tokens, found, scratch, rows, vocab, _CLOSE, threads=threads)


def told_apart(logits: Tensor, settings: Floats, places: Ints, tokens: Ints, found: Floats) -> tuple[Ints, Floats]:
    """The tokens of ``write_draws`` and their log-probabilities; those that it left open are drawn here."""
    logprobs, total, smallest = found
    if tokens.min() < 0:
        for row in np.flatnonzero(tokens == _CLOSE_CALL).tolist():
            x = logits[row].numpy()
            kept = np.flatnonzero(x >= smallest[row])
            scores = (x[kept].astype(np.float64) - x.max()) / settings[0, row]
            seed, key, position = places[1:, [row]]
            winner = (scores + gumbel_noise(noise_streams(seed, key, position, SAMPLE), kept)).argmax()
            tokens[row], logprobs[row] = kept[winner], scores[winner] - total[row]
    return tokens, logprobs


def blocks_of(vocab: int) -> int:
    return -(-vocab // BLOCK)


@kernel
def _draw(address: Any) -> None:
    a, thread, threads = read_arguments(address)
    rows, vocab, close = a[7], a[8], as_float(a[9])
    blocks = (vocab + BLOCK - 1) // BLOCK
    laws, places = int64_array(a[2], (3, rows)).view(np.float64), int64_array(a[3], (4, rows))
    drawn, found = int64_array(a[4], (rows,)), int64_array(a[5], (3, rows)).view(np.float64)
    scratch = float32_array(a[6] + 4 * thread * (vocab + blocks), (vocab + blocks,))
    weights, maxima = scratch[:vocab], scratch[vocab:]
    first, end = split_range(rows, thread, threads)
    for row in range(first, end):
        x = float32_array(a[0] + 4 * row * a[1], (vocab,))
        if not block_maxima(x, maxima):
            drawn[row] = _NAN
            continue
        top = maxima.max()
        temperature = laws[0, row]
        if temperature <= 0:
            drawn[row], total = _greedy(x, maxima, top, weights)
            found[0, row] = -math.log(total)
            continue
        factor = np.float32(min(max(1 / temperature, 1e-37), 3e38))
        smallest = max(
            _smallest(x, maxima, weights, top, factor, places[0, row], laws[1, row]),
            min(top, _rounded_up(np.float64(top) + laws[2, row])),
        )
        stream = stream_of(places[1, row], places[2, row], places[3, row], SAMPLE)
        token, lead, total = _race(x, maxima, weights, top, factor, temperature, smallest, stream)
        drawn[row] = token if lead > close else _CLOSE_CALL
        found[1, row], found[2, row] = math.log(total), smallest
        found[0, row] = (np.float64(x[token]) - np.float64(top)) / temperature - found[1, row]


@function
def _rounded_up(value: float) -> Any:
    rounded = np.float32(value)
    return np.nextafter(rounded, np.float32(np.inf)) if rounded < value else rounded


@function
def block_maxima(x: Any, maxima: Any) -> Any:
    """Each block's largest logit; whether all are numbers and the largest is finite."""
    bits = x.view(np.int32)
    least, most = _INFINITE, _MINUS_INFINITE
    for block in range(len(maxima)):
        low, high = _extremes(bits[block * BLOCK : (block + 1) * BLOCK])
        least, most = min(least, low), max(most, high)
        maxima.view(np.int32)[block] = _ordered(high)
    return least >= _MINUS_INFINITE and _MINUS_INFINITE < most < _INFINITE


@function
def _extremes(bits: Any) -> Any:
    """The least and the most as integers in the order of floats; those that are no numbers lie outside the infinities.
    Unlike that of floats, the extremes of integers are found by vectors."""
    least, most = _ORDER, np.int32(-_ORDER)
    for i in range(len(bits)):
        value = _ordered(bits[i])
        least, most = min(least, value), max(most, value)
    return least, most


@function
def _ordered(bits: Any) -> Any:
    """A float's bits as an integer in the order of floats, and back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> _31) & _ORDER))


@function
def _greedy(x: Any, maxima: Any, top: Any, weights: Any) -> Any:
    """The first of the likeliest tokens, and the sum of the weights."""
    total = _weigh(x, top, np.float32(1), weights)
    block = 0
    while maxima[block] != top:
        block += 1
    token = block * BLOCK
    while x[token] != top:
        token += 1
    return token, total


@function
def _weigh(x: Any, top: Any, factor: Any, weights: Any) -> float:
    """The weight of each token of a row, and their sum."""
    total = 0.0
    for start in range(0, len(x), BLOCK):
        end = start + BLOCK
        total += _weigh_block(x[start:end], top, factor, np.float32(-np.inf), weights[start:end])
    return total


@function
def _weigh_block(x: Any, top: Any, factor: Any, smallest: Any, weights: Any) -> Any:
    """The weights of the tokens that are kept, others 0, and their sum."""
    for i in range(len(x)):
        weight = exp32((x[i] - top) * factor)
        weights[i] = weight if x[i] >= smallest else np.float32(0)
    # In a loop of its own: one that also writes is vectorised only where what it writes does not lie close behind what
    # it reads, and adds in another order there.
    total = np.float32(0)
    for i in range(len(x)):
        total += weights[i]
    return total


@function
def _race(
    x: Any, maxima: Any, weights: Any, top: Any, factor: Any, temperature: float, smallest: Any, stream: Any
) -> Any:
    """The first token, its lead over the second in their noisy scores, and the sum of the weights of those kept."""
    token, best, second, total = 0, -np.inf, -np.inf, 0.0
    limit = _LATEST * _2_32
    weights = weights[:BLOCK]
    for block in range(len(maxima)):
        if maxima[block] < smallest:
            continue
        start = block * BLOCK
        logits = x[start : start + BLOCK]
        total += _weigh_block(logits, top, factor, smallest, weights)
        if not _someone_in_time(weights, len(logits), stream, start, limit):
            continue
        for i in range(len(logits)):
            if logits[i] >= smallest and race_bits(stream, start + i) <= _deadline(weights[i], limit):
                score = (np.float64(logits[i]) - np.float64(top)) / temperature
                score += gumbel_of(stream, start + i)
                if score > best:
                    token, best, second = start + i, score, best
                    limit = min(np.float32(math.exp(-best) * (1 + _ROUNDING)), _LATEST) * _2_32
                elif score > second:
                    second = score
    return token, best - second, total


@function
def _someone_in_time(weights: Any, count: int, stream: Any, start: int, limit: Any) -> Any:
    found = np.int32(0)
    for i in range(count):
        found |= np.int32(race_bits(stream, start + i) <= _deadline(weights[i], limit))
    return found != 0


@function
def _deadline(weight: Any, limit: Any) -> Any:
    return weight * limit + np.float32(4)


@function
def _smallest(x: Any, maxima: Any, weights: Any, top: Any, factor: Any, top_k: int, top_p: float) -> Any:
    """The smallest logit that top-k and top-p keep."""
    vocab = len(x)
    smallest = np.float32(-np.inf)
    total = 0.0
    if 0 < top_k < vocab:
        for i in range(vocab):
            weights[i] = np.float32(1)
        smallest = _reaching(x, maxima, weights, top, np.float32(1), np.float64(top_k))
    if top_p < 1:
        total = _weigh(x, top, factor, weights)
        if smallest > -np.inf:
            # Of those that tie with the last of the largest, top-p counts as many as make top_k.
            count, total = _mass(x, maxima, weights, smallest)
            total -= (count - top_k) * np.float64(exp32((smallest - top) * factor))
        step = max(np.float32(1) / factor, _SHORTEST)
        smallest = max(smallest, _reaching(x, maxima, weights, top, step, top_p * total))
    return smallest


@function
def _reaching(x: Any, maxima: Any, weights: Any, top: Any, step: Any, goal: float) -> Any:
    """The largest logit such that the weights of the tokens that reach it sum to the goal or more; minus infinity where
    no sum of what can be drawn does.

    The logit is looked for in steps down from the top that grow twofold, then by regula falsi until few tokens are
    left (Dowell & Jarratt 1971: where one end stays its value counts half, so that both come near), and by bisection
    where that takes long.
    """
    high, above, counted = np.float32(np.inf), 0.0, 0
    while True:
        low = np.float32(top - step)
        count, mass = _mass(x, maxima, weights, low)
        if mass >= goal or low == -np.inf:
            break
        high, above, counted = low, mass, count
        step *= np.float32(2)
    if low == -np.inf:
        return low
    below, over, rounds, rose = goal - above, mass - goal, 0, False
    while count - counted > _FEW:
        width = min(high, top) - low
        part = over / (over + below) if rounds < _ROUNDS else 0.5
        middle = np.float32(low + np.float32(part) * width)
        if middle <= low or middle >= high:
            middle = np.float32(low + np.float32(0.5) * width)
            if middle <= low or middle >= high:
                return low
        inside, reached = _mass(x, maxima, weights, middle)
        again = rounds > 0 and rose == (reached >= goal)
        rose = reached >= goal
        if rose:
            low, count, over = middle, inside, reached - goal
            below = 0.5 * below if again else below
        else:
            high, above, counted, below = middle, reached, inside, goal - reached
            over = 0.5 * over if again else over
        rounds += 1
    return _sorted_to(x, maxima, weights, low, high, above, goal)


@function
def _mass(x: Any, maxima: Any, weights: Any, smallest: Any) -> Any:
    """How many tokens reach a logit, and the sum of their weights."""
    count, total = 0, 0.0
    for block in range(len(maxima)):
        if maxima[block] >= smallest:
            start, end = block * BLOCK, (block + 1) * BLOCK
            inside, mass = _mass_of_block(x[start:end], weights[start:end], smallest)
            count += inside
            total += mass
    return count, total


@function
def _mass_of_block(x: Any, weights: Any, smallest: Any) -> Any:
    count, total = np.int32(0), np.float32(0)
    for i in range(len(x)):
        reached = x[i] >= smallest
        count += np.int32(reached)
        total += weights[i] if reached else np.float32(0)
    return count, total


@function
def _sorted_to(x: Any, maxima: Any, weights: Any, low: Any, high: Any, mass: float, goal: float) -> Any:
    """The logit among the few in ``[low, high)`` at which the descending weights, added to ``mass``, reach the goal."""
    logits, theirs = np.empty(_FEW, np.float32), np.empty(_FEW, np.float32)
    count = 0
    for block in range(len(maxima)):
        start = block * BLOCK
        if maxima[block] >= low and _any_between(x[start : start + BLOCK], low, high):
            for i in range(start, min(start + BLOCK, len(x))):
                if low <= x[i] < high:
                    place = count
                    while place > 0 and logits[place - 1] < x[i]:
                        logits[place], theirs[place] = logits[place - 1], theirs[place - 1]
                        place -= 1
                    logits[place], theirs[place] = x[i], weights[i]
                    count += 1
    for place in range(count):
        mass += np.float64(theirs[place])
        if mass >= goal:
            return logits[place]
    return low


@function
def _any_between(x: Any, low: Any, high: Any) -> Any:
    found = np.int32(0)
    for i in range(len(x)):
        found |= np.int32((x[i] >= low) & (x[i] < high))
    return found != 0
