"""RoPE of queries and keys, and the write of keys and values into their pages, quantized or not, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.rounding import round_to_even

_HEADS = 8
"""Heads of one token in one program."""


@triton.jit
def _rotary_write(
    QK, V, COS, SIN, SLOTS, CACHE, SCALES, OUT, heads, kv_heads, qk_stride, v_stride, kind_stride, head_stride, slots,
    LIMIT: tl.constexpr, TURNED: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One token and some of its heads: queries first, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    turning = heads + kv_heads
    turns, stays = head < turning, (head >= turning) & (head < turning + kv_heads)
    qk = QK + token * qk_stride + head * DIM
    v = V + token * v_stride + (head - turning) * DIM

    half: tl.constexpr = TURNED // 2
    d = tl.arange(0, HALF)[None, :]
    inside = d < half
    first = tl.load(qk + d, mask=turns & inside, other=0.0).to(tl.float32)
    first += tl.load(v + d, mask=stays & inside, other=0.0).to(tl.float32)
    second = tl.load(qk + half + d, mask=turns & inside, other=0.0).to(tl.float32)
    second += tl.load(v + half + d, mask=stays & inside, other=0.0).to(tl.float32)
    cos = tl.load(COS + token * TURNED + d, mask=inside, other=0.0)
    sin = tl.load(SIN + token * TURNED + half + d, mask=inside, other=0.0)
    turned = first * cos - second * sin
    second = tl.where(turns, second * cos + first * sin, second)
    first = tl.where(turns, turned, first)
    # The cache gets what was rounded as the queries are.
    first, second = first.to(OUT.dtype.element_ty), second.to(OUT.dtype.element_ty)

    out = OUT + (token * heads + head) * DIM
    asks = head < heads
    tl.store(out + d, first, mask=asks & inside)
    tl.store(out + half + d, second, mask=asks & inside)

    slot = tl.load(SLOTS + token).to(tl.int64)
    keeps = (head >= heads) & (head < turning + kv_heads) & (slot >= 0)
    kind = (head >= turning).to(tl.int64)
    own = head - heads - kind * kv_heads
    cache = CACHE + kind * kind_stride + own * head_stride + slot * DIM

    if REST > 0:
        r = TURNED + tl.arange(0, REST)[None, :]
        beyond = r < DIM
        rest = tl.load(qk + r, mask=turns & beyond, other=0.0) + tl.load(v + r, mask=stays & beyond, other=0.0)
        tl.store(out + r, rest, mask=asks & beyond)
    if LIMIT > 0:
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
        if REST > 0:
            rest = rest.to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1, keep_dims=True))
        scale = tl.maximum(largest, 1e-20) / LIMIT
        tl.store(SCALES + (kind * kv_heads + own) * slots + slot, scale, mask=keeps)
        first, second = first / scale, second / scale
        if LIMIT == 127:
            first, second = round_to_even(first), round_to_even(second)
        if REST > 0:
            rest = rest / scale
            if LIMIT == 127:
                rest = round_to_even(rest)
    tl.store(cache + d, first.to(CACHE.dtype.element_ty), mask=keeps & inside)
    tl.store(cache + half + d, second.to(CACHE.dtype.element_ty), mask=keeps & inside)
    if REST > 0:
        tl.store(cache + r, rest.to(CACHE.dtype.element_ty), mask=keeps & beyond)


def rotary_write(
    qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, scales: Tensor | None, limit: float
) -> Tensor:
    """``kernels.attention.kv_write.rotary_write`` of CUDA tensors.

    ``limit``: the largest number of the quantized type; 0 if the cache is not quantized.
    """
    tokens, kv_heads, dim = v.shape
    heads = qk.shape[1] - kv_heads
    qk, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (qk, v))
    turned = cos.shape[1]
    out = torch.empty(tokens, heads, dim, dtype=qk.dtype, device=qk.device)
    if tokens:
        _rotary_write[(tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
            qk, v, cos, sin, slots, cache, slots if scales is None else scales, out, heads, kv_heads,
            qk.stride(0), v.stride(0), cache.stride(0), cache.stride(1), cache.shape[2] * cache.shape[3],
            LIMIT=limit, TURNED=turned, DIM=dim, HALF=triton.next_power_of_2(turned // 2),
            REST=triton.next_power_of_2(dim - turned) if dim > turned else 0, HEADS=_HEADS, num_warps=2,
        )  # fmt: skip
    return out
