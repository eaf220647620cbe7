"""Sampling of tokens with bias, penalties, temperature, top-k, top-p and min-p, without sorting.

Filters keep the logits that reach a threshold (``engine.sampling.sampler``). A float32's bits order as the number does,
so the threshold is an integer, and it is found by dividing the interval that contains it by eight, again and again:
each pass over the row counts or weighs the logits above seven cuts. Passes after the first read from the second-level
cache.

Sampling is an exponential race. Its Gumbel noise is float64, as on the CPU, but it is only computed in blocks where a
bound in float32 allows a token to overtake the best one so far, which happens about as often as records are broken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.noise import gumbel_bound, gumbel_noise, hash_noise, noise_stream

_BLOCK = 2048
_PENALTY_BLOCK = 256


@triton.jit
def _apply_penalties(LOGITS, STARTS, TOKENS, BIAS, SEEN, COUNTS, SETTINGS, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    repetition, frequency = tl.load(SETTINGS + row * 3), tl.load(SETTINGS + row * 3 + 1)
    presence = tl.load(SETTINGS + row * 3 + 2)
    for first in range(start, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < end
        token = tl.load(TOKENS + index, mask=inside, other=0)
        value = tl.load(LOGITS + row * stride + token, mask=inside, other=0.0)
        value += tl.load(BIAS + index, mask=inside, other=0.0)
        repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where(tl.load(SEEN + index, mask=inside, other=0) != 0, repeated, value)
        count = tl.load(COUNTS + index, mask=inside, other=0.0)
        value -= frequency * count + presence * (count > 0).to(tl.float32)
        tl.store(LOGITS + row * stride + token, value, mask=inside)


@triton.jit
def _to_key(x):
    """Return integers that order as the floats do."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sum_above(X, vocab, key, top, slope, BLOCK: tl.constexpr):
    """Return the sum of the weights of the logits above a key; the weight of the likeliest is 1."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in tl.range(0, vocab, BLOCK, num_stages=3):
        x = tl.load(X + first + tl.arange(0, BLOCK), mask=first + tl.arange(0, BLOCK) < vocab, other=float("-inf"))
        total += tl.where(_to_key(x) > key, tl.exp((x - top) * slope), 0.0).to(tl.float64)
    return tl.sum(total)


@triton.jit
def _find_threshold(X, vocab, goal, lowest, highest, top, slope, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest key of a logit above which the count or mass is less than ``goal``, and that count or mass.

    It is above ``lowest``, and at most ``highest``, the key of the largest logit.
    """
    low, high = lowest.to(tl.int64), highest.to(tl.int64)
    above_high = 0.0
    step = tl.arange(0, 8)
    # The first cuts are equally spaced as logits: as bits, half of all numbers are smaller than one.
    cuts = tl.maximum(_to_key(top - (7 - step).to(tl.float32) * (2.0 / slope)).to(tl.int64), low)
    while high - low > 1:
        cut = cuts.to(tl.int32)
        sums = tl.zeros([8, BLOCK], tl.float32)
        smallest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        largest = tl.full([BLOCK], -0x7FFFFFFF, tl.int32)
        for first in tl.range(0, vocab, BLOCK, num_stages=3):
            x = tl.load(X + first + tl.arange(0, BLOCK), mask=first + tl.arange(0, BLOCK) < vocab, other=float("-inf"))
            inside = first + tl.arange(0, BLOCK) < vocab
            key = _to_key(x)
            between = inside & (key > low) & (key <= high)
            smallest = tl.minimum(smallest, tl.where(between, key, 0x7FFFFFFF))
            largest = tl.maximum(largest, tl.where(between, key, -0x7FFFFFFF))
            weight = tl.exp((x - top) * slope) if BY_MASS else inside.to(tl.float32)
            sums += tl.where(key[None, :] > cut[:, None], weight[None, :], 0.0)
        above = tl.sum(sums, axis=1)
        enough = above >= goal
        # ``above`` falls from cut to cut, and the last cut is ``high``, above which there is too little.
        passed = tl.minimum(tl.sum(enough.to(tl.int32)), 7)
        above_high = tl.max(tl.where(step == passed, above, 0.0))
        high = tl.max(tl.where(step == passed, cuts, -(1 << 40)))
        low = tl.where(passed == 0, low, tl.max(tl.where(step == passed - 1, cuts, -(1 << 40))))
        low = tl.maximum(low, tl.min(smallest).to(tl.int64) - 1)
        high = tl.minimum(high, tl.max(largest).to(tl.int64))
        cuts = low + ((high - low) * (step + 1).to(tl.int64)) // 8
    return high.to(tl.int32), above_high


@triton.jit
def _sample(
    LOGITS, TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED, KEY, POSITION, TOKENS, LOGPROBS, vocab, stride,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample a token of one row: largest logit, threshold of the filters, race.

    One piece, because each of the three needs the one before.
    """
    row = tl.program_id(0).to(tl.int64)
    X = LOGITS + row * stride
    lane = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    argmax = tl.zeros([BLOCK], tl.int32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, vocab, BLOCK, num_stages=3):
        x = tl.load(X + first + lane, mask=first + lane < vocab, other=float("-inf"))
        argmax = tl.where(x > largest, first + lane, argmax)
        largest = tl.maximum(largest, x)
        has_nan |= (x != x).to(tl.int32)
    top = tl.max(largest)
    likeliest = tl.minimum(tl.min(tl.where(largest == top, argmax, 0x7FFFFFFF)), vocab - 1)
    is_valid = (tl.max(has_nan) == 0) & (tl.abs(top) < float("inf"))

    temperature = tl.load(TEMPERATURE + row)
    greedy = temperature <= 0
    temperature = tl.where(greedy, 1.0, temperature)
    slope = tl.minimum(1.0 / temperature, 3e38).to(tl.float32)
    floor, highest = tl.min(lane * 0) - 0x7FFFFFFF, _to_key(top)
    if is_valid & (temperature > 0) & (greedy == 0):
        top_k, top_p, min_p = tl.load(TOP_K + row), tl.load(TOP_P + row), tl.load(MIN_P + row)
        limited = (top_k > 0) & (top_k < vocab)
        mass = 0.0
        if limited:
            goal = top_k.to(tl.float32)
            floor, above = _find_threshold(X, vocab, goal, floor - 1, highest, top, slope, False, BLOCK)
            if top_p < 1:
                # Of the logits that tie with the last one, top-p counts as many as make up the k.
                last = tl.exp((_from_key(floor) - top) * slope)
                mass = (_sum_above(X, vocab, floor, top, slope, BLOCK) + (goal - above) * last).to(tl.float32)
        if top_p < 1:
            if limited == 0:
                mass = _sum_above(X, vocab, floor - 1, top, slope, BLOCK).to(tl.float32)
            goal = (mass * top_p).to(tl.float32)
            floor, above = _find_threshold(X, vocab, goal, floor - 1, highest, top, slope, True, BLOCK)
        if min_p > 0:
            least = top.to(tl.float64) + temperature * tl.log(min_p)
            rounded = least.to(tl.float32)
            key = _to_key(rounded) + (rounded.to(tl.float64) < least).to(tl.int32)
            floor = tl.maximum(floor, tl.minimum(key, highest))

    stream = noise_stream(tl.load(SEED + row), tl.load(KEY + row), tl.load(POSITION + row), PURPOSE)
    total = tl.zeros([BLOCK], tl.float64)
    best = tl.min(lane.to(tl.float64) * 0) + float("-inf")
    token = likeliest
    for first in tl.range(0, vocab, BLOCK, num_stages=3):
        x = tl.load(X + first + lane, mask=first + lane < vocab, other=float("-inf"))
        kept = (first + lane < vocab) & (_to_key(x) >= floor)
        distance = (x - top) * slope
        total += tl.where(kept, tl.exp(distance), 0.0).to(tl.float64)
        bits = hash_noise(stream, first + lane)
        racing = kept & (distance + gumbel_bound(bits) >= (best - 1e-3).to(tl.float32))
        if (tl.max(racing.to(tl.int32)) > 0) & (greedy == 0):
            score = (x.to(tl.float64) - top.to(tl.float64)) / temperature + gumbel_noise(bits)
            score = tl.where(racing, score, float("-inf"))
            leading = tl.max(score)
            if leading > best:
                best = leading
                token = tl.min(tl.where(score == leading, first + lane, 0x7FFFFFFF))
    won = (tl.load(X + token).to(tl.float64) - top.to(tl.float64)) / temperature
    tl.store(TOKENS + row, tl.where(is_valid, token, -1).to(tl.int64))
    tl.store(LOGPROBS + row, tl.where(is_valid, won - tl.log(tl.sum(total)), float("nan")))


def apply_penalties(
    logits: Tensor, starts: Tensor, tokens: Tensor, bias: Tensor, seen: Tensor, counts: Tensor, settings: Tensor
) -> None:
    """``kernels.sampling.sampling.apply_penalties`` of CUDA tensors."""
    rows = len(logits)
    if rows:
        # Products and sums are rounded one by one, as they are on the CPU.
        _apply_penalties[(rows,)](
            logits, starts, tokens, bias, seen, counts, settings, logits.stride(0),
            BLOCK=_PENALTY_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor,
    seed: Tensor, key: Tensor, position: Tensor, purpose: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``kernels.sampling.sampling.sample`` of CUDA tensors."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float64, device=logits.device)
    if rows:
        _sample[(rows,)](
            logits, temperature, top_p, min_p, top_k, seed, key, position, tokens, logprobs, vocab, logits.stride(0),
            PURPOSE=purpose, BLOCK=_BLOCK, num_warps=16,
        )  # fmt: skip
    return tokens, logprobs
