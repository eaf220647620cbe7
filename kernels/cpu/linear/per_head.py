"""Products with a matrix for each head, in one kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.runtime.kernel import kernel, read_arguments, split_range
from kernels.cpu.runtime.recorder import empty
from kernels.cpu.simd.products import MAX_MIXED_ROWS, mixer
from kernels.cpu.simd.vector import splat, store

_ONE_THREAD_PRODUCTS = 1 << 18
"""Multiplications up to which one thread is done before a second one has started."""

_mix_line, _mix_wide = mixer(1), mixer(4)


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``[heads, tokens, out]`` of float32 ``x`` ``[tokens, heads, in]``, whose last axis is contiguous, and
    ``weight`` ``[heads, in, out]``; ``out`` is a multiple of 16."""
    (tokens, heads, num_in), num_out = x.shape, weight.shape[2]
    out = empty(heads, tokens, num_out)
    strides = 4 * x.stride(0), 4 * x.stride(1)
    work = tokens * heads * num_in * num_out
    _multiply_heads(
        x,
        weight,
        out,
        tokens,
        heads,
        num_in,
        num_out,
        *strides,
        threads=1 if work < _ONE_THREAD_PRODUCTS else None,
    )
    return out


@kernel
def _multiply_heads(address: Any) -> None:
    """Add the rows of each head's matrix, times the numbers of each token.

    Arguments ``(x, weight, out, tokens, heads, num_in, num_out, token_stride, head_stride)``; strides of ``x`` in
    bytes. The order of a sum is that of the inputs, whatever the number of tokens and threads.
    """
    a, thread, threads = read_arguments(address)
    tokens, heads, num_in, num_out, token_stride, head_stride = a[3], a[4], a[5], a[6], a[7], a[8]
    stride, wide_end = 4 * num_out, num_out // 64 * 64
    first, end = split_range(heads, thread, threads)
    for head in range(first, end):
        weights = a[1] + stride * num_in * head
        for token in range(0, tokens, MAX_MIXED_ROWS):
            rows = min(MAX_MIXED_ROWS, tokens - token)
            source, target = a[0] + token_stride * token + head_stride * head, a[2] + stride * (tokens * head + token)
            for i in range(0, rows * stride, 64):
                store(target + i, splat(np.float32(0)))
            for i in range(0, 4 * wide_end, 256):
                ahead = weights + i
                _mix_wide(rows, target + i, source, token_stride, weights + i, stride, num_in, ahead)
            for i in range(4 * wide_end, stride, 64):
                _mix_line(rows, target + i, source, token_stride, weights + i, stride, num_in, weights + i)
