"""The gated delta rule, token by token, with a part of a head's matrix in the registers of a warp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.recurrent.chunks import MIN_TOKENS, delta_chunks
from kernels.triton.recurrent.functions import count_chained, softplus
from kernels.triton.recurrent.parts import align_rows, choose_part

_BLOCK = 512


@triton.jit(do_not_specialize=["size"])
def _delta_gates(A, B, RATES, BIAS, DECAY, BETA, size, heads, a_stride, b_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    token, head = index // heads, index % heads
    a = tl.load(A + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(B + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(RATES + head, mask=inside, other=0.0)
    bias = tl.load(BIAS + head, mask=inside, other=0.0)
    tl.store(DECAY + index, rate * softplus(a + bias), mask=inside)
    tl.store(BETA + index, tl.sigmoid(b), mask=inside)


def delta_gates(a: Tensor, b: Tensor, rates: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """``kernels.recurrent.gated_delta.delta_gates`` of CUDA tensors; the results are float32."""
    a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (a, b))
    decay, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if a.numel():
        _delta_gates[(triton.cdiv(a.numel(), _BLOCK),)](
            a, b, rates, bias, decay, beta, a.numel(), a.shape[1], a.stride(0), b.stride(0), BLOCK=_BLOCK, num_warps=4
        )
    return decay, beta


@triton.jit
def _gated_delta(
    Q, K, V, DECAY, BETA, STATES, SEGMENTS, OUT, q_stride, k_stride, v_stride, slot_size, heads, repeats,
    key_dim, value_dim, scale, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, MIN: tl.constexpr,
):  # fmt: skip
    head, first = tl.program_id(1), tl.program_id(2)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < key_dim, value < value_dim
    inside = is_key[:, None] & is_value[None, :]
    place = (head * key_dim + key[:, None]) * value_dim + value[None, :]
    key_column, value_column = head // repeats * key_dim + key, head * value_dim + value
    state = tl.zeros([KEYS, VALUES], tl.float32)
    last = tl.full([], -2, tl.int64)  # the slot whose state is in the registers
    for index in range(first, first + count_chained(SEGMENTS, first, MIN, False)):
        start, end = tl.load(SEGMENTS + 5 * index), tl.load(SEGMENTS + 5 * index + 1)
        source, target = tl.load(SEGMENTS + 5 * index + 2), tl.load(SEGMENTS + 5 * index + 3)
        if start < end:
            if source != last:
                tl.debug_barrier()  # other threads may have written what is read of an earlier segment's state
                state = tl.load(STATES + source * slot_size + place, mask=inside & (source >= 0), other=0.0)
            for token in range(start, end):
                q = tl.load(Q + token * q_stride + key_column, mask=is_key, other=0.0).to(tl.float32)
                k = tl.load(K + token * k_stride + key_column, mask=is_key, other=0.0).to(tl.float32)
                v = tl.load(V + token * v_stride + value_column, mask=is_value, other=0.0).to(tl.float32)
                q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + eps) * scale)
                k = k * tl.rsqrt(tl.sum(k * k, axis=0) + eps)
                state = state * tl.exp(tl.load(DECAY + token * heads + head))
                held = tl.sum(k[:, None] * state, axis=0)
                change = (v - held) * tl.load(BETA + token * heads + head)
                state = state + k[:, None] * change[None, :]
                out = tl.sum(q[:, None] * state, axis=0).to(OUT.dtype.element_ty)
                tl.store(OUT + token * heads * value_dim + value_column, out, mask=is_value)
            tl.store(STATES + target * slot_size + place, state, mask=inside)
            last = target


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    segments: Tensor,
    eps: float,
    *,
    in_chunks: bool,
) -> Tensor:
    """``kernels.recurrent.gated_delta.gated_delta`` of CUDA tensors.

    ``q``, ``k`` and ``v`` may be 16-bit. ``eps``: of the norms of keys and queries.
    """
    (tokens, heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[1:]
    q, k, v = (align_rows(x) for x in (q, k, v))
    decay, beta = decay.contiguous(), beta.contiguous()
    out = torch.empty(tokens, heads, value_dim, dtype=v.dtype, device=v.device)
    in_chunks = in_chunks and v.dtype == torch.bfloat16
    rows, columns = choose_part(key_dim, value_dim)
    if tokens:
        _gated_delta[(triton.cdiv(value_dim, columns), heads, len(segments))](
            q, k, v, decay, beta, states, segments, out, q.stride(0), k.stride(0),
            v.stride(0), heads * key_dim * value_dim, heads, heads // key_heads, key_dim, value_dim, key_dim**-0.5, eps,
            KEYS=rows, VALUES=columns, MIN=MIN_TOKENS if in_chunks else 0, num_warps=1,
        )  # fmt: skip
    if tokens and in_chunks:
        delta_chunks(q, k, v, decay, beta, states, segments, eps, out)
    return out
