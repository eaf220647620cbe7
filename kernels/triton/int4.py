"""Rotation of groups of 32 numbers, and the write of keys and values into pages of 4 bits.

The Hadamard matrix of 32 rows is that of 16 rows twice: with the sums of a group's halves, and with the differences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32
"""Groups, or pairs of sixteen numbers, in one program."""
_UNIT = tl.constexpr(32**-0.5)


@triton.jit
def _rotate_halves(left, right):
    """Return both halves of rotated groups ``[groups, 16]``."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    bits = row & column
    bits = bits ^ (bits >> 2)
    bits = (bits ^ (bits >> 1)) & 1
    matrix = (1 - 2 * bits).to(tl.float32)
    sums = tl.dot(left + right, matrix, input_precision="ieee")
    differences = tl.dot(left - right, matrix, input_precision="ieee")
    return sums * _UNIT, differences * _UNIT


@triton.jit(do_not_specialize=["count"])
def _rotate(X, OUT, count, heads, token_stride, head_stride, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Rotate ``ROWS`` groups."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 16)[None, :]
    inside = (group < count)[:, None]
    vector = group // GROUPS
    start = vector // heads * token_stride + vector % heads * head_stride + group % GROUPS * 32
    left = tl.load(X + start[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(X + start[:, None] + 16 + column, mask=inside, other=0.0).to(tl.float32)
    left, right = _rotate_halves(left, right)
    out = OUT + 32 * group[:, None] + column
    tl.store(out, left.to(OUT.dtype.element_ty), mask=inside)
    tl.store(out + 16, right.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _load_rotated(x, run, inside):
    """Return sixteen numbers of rotated vectors, the run-th ones, and the rounded scale of their groups."""
    column = tl.arange(0, 16)[None, :]
    start = x + run // 2 * 32
    left = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(start + 16 + column, mask=inside, other=0.0).to(tl.float32)
    left, right = _rotate_halves(left, right)
    scale = tl.max(tl.maximum(tl.abs(left), tl.abs(right)), axis=1, keep_dims=True) * 0.125
    return tl.where(run % 2 == 0, left, right), scale.to(tl.float16)


@triton.jit
def _encode(x, scale):
    """Return the codes of rotated numbers, 0 to 15."""
    steps = tl.floor(x / tl.maximum(scale.to(tl.float32), 5.9604644775390625e-08))
    return (tl.minimum(tl.maximum(steps, -8.0), 7.0) + 8.0).to(tl.uint8)


@triton.jit
def _pack(
    KV, SLOTS, CACHE, SCALES, num_vectors, kv_heads, kv_stride, kind_stride, head_stride, slots,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values, in pairs of sixteen numbers that lie half a vector apart."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    slot = tl.load(SLOTS + token).to(tl.int64)
    head, low_run = pair // GROUPS, pair % GROUPS
    high_run = low_run + GROUPS
    inside = (head < num_vectors) & (slot >= 0)
    x = KV + token * kv_stride + head * (32 * GROUPS)
    low, low_scale = _load_rotated(x, low_run, inside)
    high, high_scale = _load_rotated(x, high_run, inside)
    kind = (head >= kv_heads).to(tl.int64)
    kv_head = head - kind * kv_heads
    byte = CACHE + kind * kind_stride + kv_head * head_stride + slot * (16 * GROUPS) + 16 * low_run
    packed = _encode(low, low_scale) | (_encode(high, high_scale) << 4)
    tl.store(byte + tl.arange(0, 16)[None, :], packed, mask=inside)
    # Of the two runs of a group the first writes the scale.
    scales = SCALES + ((kind * kv_heads + kv_head) * slots + slot) * GROUPS
    tl.store(scales + low_run // 2, low_scale, mask=inside & (low_run % 2 == 0))
    tl.store(scales + high_run // 2, high_scale, mask=inside & (high_run % 2 == 0))


def rotate_groups(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors ``[tokens, heads, n]``, whose last axis has stride 1, with each group of 32 numbers rotated."""
    tokens, heads, n = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    count = tokens * heads * n // 32
    if count:
        _rotate[(triton.cdiv(count, _ROWS),)](
            x, out, count, heads, x.stride(0), x.stride(1), GROUPS=n // 32, ROWS=_ROWS, num_warps=2
        )
    return out


def write_packed(kv: Tensor, slots: Tensor, cache: Tensor, scales: Tensor) -> None:
    """Write keys and values ``[tokens, kinds * kv_heads, n]``, keys first, into one layer's pages of 4 bits.

    ``kv`` has contiguous tokens; for the others see ``kernels.attention.kv_write.rotary_write``.
    """
    tokens, heads, n = kv.shape
    if tokens:
        _pack[(tokens, triton.cdiv(heads * n // 32, _ROWS))](
            kv, slots, cache, scales, heads, cache.shape[1], kv.stride(0), cache.stride(0), cache.stride(1),
            cache.shape[2] * cache.shape[3], GROUPS=n // 32, ROWS=_ROWS, num_warps=2,
        )  # fmt: skip
