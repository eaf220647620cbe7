"""RoPE of queries and keys, and the write of keys and values into their pages, quantized or not, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.int4 import INT4
from kernels.triton.int4 import write_packed
from kernels.triton.quantize import round_to_even

_HEADS = 8
"""Heads of one token in one program."""


@triton.jit
def _rotary_write(
    QK, V, COS, SIN, SLOTS, CACHE, SCALES, OUT, heads, kv_heads, value_heads, qk_stride, v_stride, kind_stride,
    head_stride, slots,
    LIMIT: tl.constexpr, ROTATED: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Process one token and some of its heads: queries first, then keys, then values.

    Unless ``STORED``, keys and values go behind the queries in ``OUT`` and not into the cache.

    One piece, because all of it works on the two halves of the same vectors in registers.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    num_rotated_heads = heads + kv_heads
    num_heads = num_rotated_heads + value_heads
    is_rotated, is_value = head < num_rotated_heads, (head >= num_rotated_heads) & (head < num_heads)
    qk = QK + token * qk_stride + head * DIM
    v = V + token * v_stride + (head - num_rotated_heads) * DIM

    half: tl.constexpr = ROTATED // 2
    d = tl.arange(0, HALF)[None, :]
    inside = d < half
    first = tl.load(qk + d, mask=is_rotated & inside, other=0.0).to(tl.float32)
    first += tl.load(v + d, mask=is_value & inside, other=0.0).to(tl.float32)
    second = tl.load(qk + half + d, mask=is_rotated & inside, other=0.0).to(tl.float32)
    second += tl.load(v + half + d, mask=is_value & inside, other=0.0).to(tl.float32)
    cos = tl.load(COS + token * ROTATED + d, mask=inside, other=0.0)
    sin = tl.load(SIN + token * ROTATED + half + d, mask=inside, other=0.0)
    rotated = first * cos - second * sin
    second = tl.where(is_rotated, second * cos + first * sin, second)
    first = tl.where(is_rotated, rotated, first)
    # The cache gets what was rounded as the queries are.
    first, second = first.to(OUT.dtype.element_ty), second.to(OUT.dtype.element_ty)

    written_heads = heads if STORED else num_heads
    out = OUT + (token * written_heads + head) * DIM
    is_query = head < written_heads
    tl.store(out + d, first, mask=is_query & inside)
    tl.store(out + half + d, second, mask=is_query & inside)

    if REST > 0:
        r = ROTATED + tl.arange(0, REST)[None, :]
        in_rest = r < DIM
        rest = tl.load(qk + r, mask=is_rotated & in_rest, other=0.0) + tl.load(
            v + r, mask=is_value & in_rest, other=0.0
        )
        tl.store(out + r, rest, mask=is_query & in_rest)
    if STORED:
        slot = tl.load(SLOTS + token).to(tl.int64)
        is_stored = (head >= heads) & (head < num_heads) & (slot >= 0)
        kind = (head >= num_rotated_heads).to(tl.int64)
        kv_head = head - heads - kind * kv_heads
        cache = CACHE + kind * kind_stride + kv_head * head_stride + slot * DIM
        if LIMIT > 0:
            first, second = first.to(tl.float32), second.to(tl.float32)
            largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1, keep_dims=True)
            if REST > 0:
                rest = rest.to(tl.float32)
                largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1, keep_dims=True))
            scale = tl.maximum(largest, 1e-20) / LIMIT
            tl.store(SCALES + (kind * kv_heads + kv_head) * slots + slot, scale, mask=is_stored)
            first, second = first / scale, second / scale
            if LIMIT == 127:
                first, second = round_to_even(first), round_to_even(second)
            if REST > 0:
                rest = rest / scale
                if LIMIT == 127:
                    rest = round_to_even(rest)
        tl.store(cache + d, first.to(CACHE.dtype.element_ty), mask=is_stored & inside)
        tl.store(cache + half + d, second.to(CACHE.dtype.element_ty), mask=is_stored & inside)
        if REST > 0:
            tl.store(cache + r, rest.to(CACHE.dtype.element_ty), mask=is_stored & in_rest)


def rotary_write(
    qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, scales: Tensor | None, limit: float
) -> Tensor:
    """``kernels.attention.kv_write.rotary_write`` of CUDA tensors.

    ``limit``: the largest number of the quantized type; 0 if the cache is not quantized.
    """
    (tokens, num_rotated_heads, dim), kv_heads, value_heads = qk.shape, cache.shape[1], v.shape[1]
    heads, num_heads = num_rotated_heads - kv_heads, num_rotated_heads + value_heads
    qk, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (qk, v))
    is_packed = cache.dtype == INT4
    out = torch.empty(tokens, num_heads if is_packed else heads, dim, dtype=qk.dtype, device=qk.device)
    if tokens:
        _rotary_write[(tokens, triton.cdiv(num_heads, _HEADS))](
            qk, v, cos, sin, slots, cache, slots if scales is None else scales, out, heads, kv_heads, value_heads,
            qk.stride(0), v.stride(0), cache.stride(0), cache.stride(1), cache.shape[2] * cache.shape[3],
            LIMIT=limit, STORED=not is_packed, **_choose_sizes(dim, cos.shape[1]),
        )  # fmt: skip
    if is_packed and scales is not None:
        write_packed(out[:, heads:], slots, cache, scales)
    return out[:, :heads]


def rotate(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``kernels.attention.kv_write.rotate`` of CUDA tensors."""
    tokens, heads, dim = q.shape
    q = q if q.stride()[1:] == (dim, 1) else q.contiguous()
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    if tokens:
        # Without keys and values nothing is read of their tensors.
        _rotary_write[(tokens, triton.cdiv(heads, _HEADS))](
            q, q, cos, sin, None, None, None, out, heads, 0, 0, q.stride(0), 0, 0, 0, 0,
            LIMIT=0.0, STORED=False, **_choose_sizes(dim, cos.shape[1]),
        )  # fmt: skip
    return out


def _choose_sizes(dim: int, rotated: int) -> dict[str, int]:
    """Return the sizes of a program for vectors of ``dim`` numbers, of which the first are rotated."""
    rest = triton.next_power_of_2(dim - rotated) if dim > rotated else 0
    half = triton.next_power_of_2(rotated // 2)
    return {"ROTATED": rotated, "DIM": dim, "HALF": half, "REST": rest, "HEADS": _HEADS, "num_warps": 2}
