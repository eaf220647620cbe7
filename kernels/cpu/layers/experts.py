"""Routing of tokens to experts, and the sums of the experts' outputs; see ``engine.models.routing``.

All sizes but the numbers of each expert's tokens are known when kernels are recorded, and those are read from memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
from kernels.cpu.simd.exp import exp32

_MIN_SUMMANDS_FOR_THREADS = 1 << 14
"""With fewer summands one thread is done before a second one has started."""


class Route(NamedTuple):
    """The rows that experts compute for a step's tokens, sorted by expert."""

    ends: Tensor
    """``[experts + 1]``: 0, then the row after the last one of each expert."""
    tokens: Tensor
    """``[rows]``: the token of each row."""
    rows: Tensor
    """``[tokens * per_token]``: the row of each expert of each token."""


def choose_experts(
    logits: Tensor,
    correction: Tensor | None,
    *,
    per_token: int,
    is_softmax: bool,
    is_normalized: bool,
    num_groups: int,
    groups_per_token: int,
    scale: float,
    least_sum: float,
) -> tuple[Tensor, Tensor]:
    """Return the weights and the indices of each token's experts, ``[tokens, per_token]``; see ``Router``."""
    tokens, experts = logits.shape
    weights, chosen = empty(tokens, per_token), _empty_int64(tokens * per_token)
    scratch = empty(2 * experts + num_groups)
    _choose_experts(
        logits,
        0 if correction is None else correction,
        weights,
        chosen,
        scratch,
        tokens,
        experts,
        per_token,
        int(is_softmax),
        int(is_normalized),
        num_groups,
        groups_per_token,
        scale,
        least_sum,
        threads=1,
    )
    return weights, chosen.view(tokens, per_token)


def sort_by_expert(chosen: Tensor, num_experts: int) -> Route:
    """Return the rows of experts ``[tokens, per_token]``."""
    tokens, per_token = chosen.shape
    count = tokens * per_token
    route = Route(_empty_int64(num_experts + 1), _empty_int64(count), _empty_int64(count))
    _sort_by_expert(chosen, *route, count, per_token, num_experts, threads=1)
    return route


def add_outputs(outputs: Tensor, weights: Tensor, rows: Tensor, residual: Tensor | None) -> Tensor:
    """Return the weighted sums ``[tokens, n]`` of the tokens' rows of ``outputs``, plus a contiguous ``residual``."""
    (tokens, per_token), width = weights.shape, outputs.shape[1]
    out = empty(tokens, width)
    added = 0 if residual is None else residual
    threads = 1 if tokens * per_token * width < _MIN_SUMMANDS_FOR_THREADS else None
    _add_outputs(outputs, weights, rows, added, out, tokens, per_token, width, threads=threads)
    return out


def _empty_int64(size: int) -> Tensor:
    return empty(2 * size).view(torch.int64)


@function
def _find_best(ranked: Any, first: int, end: int) -> Any:
    """Return the index of the largest number from ``first`` to before ``end``, the first of equal ones."""
    best = first
    for index in range(first + 1, end):
        if ranked[index] > ranked[best]:
            best = index
    return best


@function
def _hide_groups(ranked: Any, best: Any, has_correction: bool, groups: int, per_token: int) -> None:
    """Set the experts of all groups but the best ``per_token`` to minus infinity. ``best`` ``[groups]`` is scratch."""
    size = len(ranked) // groups
    for group in range(groups):
        first, end = group * size, (group + 1) * size
        top = _find_best(ranked, first, end)
        best[group] = ranked[top]
        if has_correction:
            second = np.float32(-np.inf)
            for index in range(first, end):
                if index != top and ranked[index] > second:
                    second = ranked[index]
            best[group] += second
    for _ in range(per_token):
        best[_find_best(best, 0, groups)] = np.float32(-np.inf)
    for group in range(groups):
        if best[group] != np.float32(-np.inf):  # it was not chosen
            ranked[group * size : (group + 1) * size] = np.float32(-np.inf)


@kernel
def _choose_experts(address: Any) -> None:
    a, _, _ = read_arguments(address)
    tokens, experts, per_token, groups = a[5], a[6], a[7], a[10]
    logits, correction = float32_array(a[0], (tokens, experts)), float32_array(a[1], experts)
    weights, chosen = float32_array(a[2], (tokens, per_token)), int64_array(a[3], (tokens, per_token))
    scores, ranked = float32_array(a[4], experts), float32_array(a[4] + 4 * experts, experts)
    best, scale = float32_array(a[4] + 8 * experts, groups), np.float32(as_float(a[12]))
    for token in range(tokens):
        top, total = logits[token, _find_best(logits[token], 0, experts)], np.float32(0)
        for e in range(experts):
            if a[8]:
                scores[e] = exp32(np.float32(logits[token, e] - top))
                total += scores[e]
            else:
                scores[e] = np.float32(1) / (np.float32(1) + exp32(np.float32(-logits[token, e])))
        for e in range(experts):
            if a[8]:
                scores[e] = scores[e] / total
            ranked[e] = scores[e] + correction[e] if a[1] else scores[e]
        if groups > a[11]:
            _hide_groups(ranked, best, a[1] != 0, groups, a[11])
        total = np.float32(0 if a[8] else as_float(a[13]))
        for index in range(per_token):
            e = _find_best(ranked, 0, experts)
            chosen[token, index], weights[token, index] = e, scores[e]
            total += scores[e]
            ranked[e] = np.float32(-np.inf)
        for index in range(per_token):
            weight = weights[token, index] / total if a[9] else weights[token, index]
            weights[token, index] = weight * scale


@kernel
def _sort_by_expert(address: Any) -> None:
    a, _, _ = read_arguments(address)
    count, per_token, experts = a[4], a[5], a[6]
    chosen, ends = int64_array(a[0], count), int64_array(a[1], experts + 1)
    tokens, rows = int64_array(a[2], count), int64_array(a[3], count)
    ends[:] = 0
    for index in range(count):
        ends[chosen[index] + 1] += 1
    for e in range(experts):
        ends[e + 1] += ends[e]
    for index in range(count):
        row = ends[chosen[index]]
        ends[chosen[index]] += 1
        tokens[row], rows[index] = index // per_token, row
    # Each expert's begin has moved to its end, which is the begin of the next.
    for e in range(experts, 0, -1):
        ends[e] = ends[e - 1]
    ends[0] = 0


@kernel
def _add_outputs(address: Any) -> None:
    a, thread, threads = read_arguments(address)
    tokens, per_token, width = a[5], a[6], a[7]
    weights, rows = float32_array(a[1], (tokens, per_token)), int64_array(a[2], (tokens, per_token))
    out = float32_array(a[4], (tokens, width))
    first, end = split_range(tokens, thread, threads)
    for token in range(first, end):
        for index in range(per_token):
            outputs, weight = float32_array(a[0] + 4 * width * rows[token, index], width), weights[token, index]
            for i in range(width):
                out[token, i] = weight * outputs[i] if index == 0 else out[token, i] + weight * outputs[i]
        if a[3]:
            residual = float32_array(a[3] + 4 * width * token, width)
            for i in range(width):
                out[token, i] += residual[i]
