"""The gated delta rule (Yang et al. 2025, https://arxiv.org/abs/2412.06464): linear attention that overwrites.

A head keeps a matrix ``S`` ``[key_dim, value_dim]`` that maps keys to values. A token decays it by ``g``, replaces what
it holds under the key by a share ``beta`` of the new value, and reads it with the query::

    S <- g * S
    S <- S + k (beta * (v - k S))
    out = q S

States and gates are float32; queries, keys and values may be 16-bit on a GPU.
Keys and queries have length 1, and queries are divided by ``sqrt(key_dim)``. The tokens of a sequence are computed one
after the other, so that a token's result is, bit for bit, a function of its sequence alone, however steps divide it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.recurrent import gated_delta as on_cpu

NORM_EPS = 1e-6


def delta_gates(a: Tensor, b: Tensor, rates: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``decay`` and ``beta`` of ``gated_delta``: ``rates * softplus(a + bias)`` and ``sigmoid(b)``.

    ``a`` and ``b``: ``[tokens, heads]``, projected; ``rates`` and ``bias``: ``[heads]``, of whose type the results are.
    """
    if a.is_cuda:
        from kernels.triton.recurrent import gated_delta as on_gpu

        return on_gpu.delta_gates(a, b, rates, bias)
    if can_use_kernels(a, b, rates, bias):
        return on_cpu.delta_gates(a, b, rates, bias)
    return rates * F.softplus(a + bias), torch.sigmoid(b.to(rates.dtype))


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    segments: Tensor,
    *,
    in_chunks: bool = False,
) -> Tensor:
    """Return the outputs ``[tokens, heads, value_dim]`` of a step's tokens, and write the states after them.

    ``q`` and ``k``: ``[tokens, key_heads, key_dim]``, each read by ``heads // key_heads`` consecutive heads. ``v``:
    ``[tokens, heads, value_dim]``. ``decay``: the logarithm of ``g``, ``[tokens, heads]``; ``beta``: the same shape.
    ``states``: ``[slots, heads, key_dim, value_dim]``. ``segments``: see ``causal_convolution``.
    ``in_chunks``: on a GPU, compute many tokens of a sequence by products of matrices; the results then depend, by
    roundings, on where its segments begin.
    """
    if v.is_cuda:
        from kernels.triton.recurrent import gated_delta as on_gpu

        return on_gpu.gated_delta(q, k, v, decay, beta, states, segments, NORM_EPS, in_chunks=in_chunks)
    if can_use_kernels(q, k, v, states):
        return on_cpu.gated_delta(q, k, v, decay, beta, states, segments)
    dtype = v.dtype
    q, k, v = (x.to(states.dtype) for x in (q, k, v))
    q, k = (x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for x in (q, k))
    repeats = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    out = torch.empty_like(v)
    for start, end, source, target, _ in segments[segments[:, 0] < segments[:, 1]].tolist():
        state = states[source].clone() if source >= 0 else torch.zeros_like(states[target])
        for token in range(start, end):
            state = state * decay[token].exp()[:, None, None]
            held = (k[token][..., None] * state).sum(1)
            change = (v[token] - held) * beta[token][:, None]
            state = state + k[token][..., None] * change[:, None]
            out[token] = (q[token][..., None] * state).sum(1)
        states[target] = state
    return out.to(dtype)
