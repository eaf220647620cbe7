"""The recurrence of Mamba-2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060): a state that decays and is added to.

A head keeps a matrix ``S`` ``[state_size, head_dim]``. A token has a step size, by which the state decays and by which
the token's input is added to it under the vector ``b``, and reads the state with the vector ``c``::

    step = clamp(softplus(dt + bias))
    S <- exp(step * rate) * S + (step * b) x
    out = c S + skip * x

States and constants are float32; the inputs of tokens may be 16-bit on a GPU.
The tokens of a sequence are computed one after the other, so that a token's result is, bit for bit, a function of its
sequence alone, however steps divide it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.recurrent import mamba2 as on_cpu


class HeadConstants(NamedTuple):
    """Learned numbers of each head, ``[heads]`` each."""

    rates: Tensor
    """Negative."""
    bias: Tensor
    """Added to ``dt``."""
    skips: Tensor
    """Factors of a token's input in its own output."""
    least: float
    most: float
    """The range of all step sizes."""


def mamba2_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    heads: HeadConstants,
    states: Tensor,
    segments: Tensor,
    *,
    in_chunks: bool = False,
) -> Tensor:
    """Return the outputs ``[tokens, heads, head_dim]`` of a step's tokens, and write the states after them.

    ``x``: ``[tokens, heads, head_dim]``. ``b`` and ``c``: ``[tokens, groups, state_size]``, each read by ``heads //
    groups`` consecutive heads. ``dt``: ``[tokens, heads]``, projected. ``states``: ``[slots, heads, state_size,
    head_dim]``. ``segments``: see ``causal_convolution``. ``in_chunks``: see ``gated_delta``.
    """
    if x.is_cuda:
        from kernels.triton.recurrent import mamba2 as on_gpu

        constants, limits = (heads.rates, heads.bias, heads.skips), (heads.least, heads.most)
        return on_gpu.mamba2_scan(x, b, c, dt, constants, limits, states, segments, in_chunks=in_chunks)
    if can_use_kernels(x, b, c, dt, states):
        return on_cpu.mamba2_scan(x, b, c, dt, heads, states, segments)
    steps = F.softplus(dt + heads.bias).clamp(heads.least, heads.most)
    decays = (steps * heads.rates).exp()
    dtype = x.dtype
    x, b, c = (part.to(states.dtype) for part in (x, b, c))
    b, c = (part.repeat_interleave(x.shape[1] // part.shape[1], dim=1) for part in (b, c))
    out = torch.empty_like(x)
    for start, end, source, target, _ in segments[segments[:, 0] < segments[:, 1]].tolist():
        state = states[source].clone() if source >= 0 else torch.zeros_like(states[target])
        for token in range(start, end):
            written = (steps[token][:, None] * b[token])[..., None] * x[token][:, None]
            state = state * decays[token][:, None, None] + written
            out[token] = (c[token][..., None] * state).sum(1) + heads.skips[:, None] * x[token]
        states[target] = state
    return out.to(dtype)
