"""Short causal convolutions in tiles of tokens and channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _CHANNELS = 16, 64
"""Size of a tile."""


@triton.jit
def _convolve(
    X, WEIGHT, BIAS, STATES, SEGMENTS, OUT, channels, stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < channels
    first = tl.program_id(1)
    for index in range(first, first + tl.load(SEGMENTS + 5 * first + 4).to(tl.int32)):
        start, end = tl.load(SEGMENTS + 5 * index), tl.load(SEGMENTS + 5 * index + 1)
        source, target = tl.load(SEGMENTS + 5 * index + 2), tl.load(SEGMENTS + 5 * index + 3)
        tl.debug_barrier()  # other threads may have written what is read of an earlier segment's state
        history = STATES + source * (WIDTH - 1) * channels + column
        for begin in range(start, end, TOKENS):
            token = begin + tl.arange(0, TOKENS)[:, None]
            total = tl.zeros([TOKENS, BLOCK], tl.float32)
            for tap in tl.static_range(WIDTH):
                position = token + (tap - WIDTH + 1)
                is_own = position >= start
                is_read = (token < end) & inside
                own = tl.load(X + position * stride + column, mask=is_read & is_own, other=0.0).to(tl.float32)
                row = position - start + (WIDTH - 1)
                is_old = is_read & (position < start) & (source >= 0)
                old = tl.load(history + row * channels, mask=is_old, other=0.0)
                weight = tl.load(WEIGHT + tap * channels + column, mask=inside, other=0.0)
                total += tl.where(is_own, own, old) * weight
            if HAS_BIAS:
                total += tl.load(BIAS + column, mask=inside, other=0.0)
            if ACTIVATE:
                total = total * tl.sigmoid(total)
            tl.store(OUT + token * channels + column, total.to(OUT.dtype.element_ty), mask=(token < end) & inside)
        if start < end:
            row = tl.arange(0, ROWS)[:, None]
            is_state = (row < WIDTH - 1) & inside
            position = end - (WIDTH - 1) + row
            is_own = position >= start
            own = tl.load(X + position * stride + column, mask=is_state & is_own, other=0.0).to(tl.float32)
            is_old = is_state & (position < start) & (source >= 0)
            old = tl.load(history + (row + (end - start)) * channels, mask=is_old, other=0.0)
            tl.debug_barrier()  # all is read of a state before it is overwritten
            place = STATES + target * (WIDTH - 1) * channels + row * channels + column
            tl.store(place, tl.where(is_own, own, old), mask=is_state)


def causal_convolution(
    x: Tensor, weight: Tensor, states: Tensor, segments: Tensor, bias: Tensor | None, *, activate: bool
) -> Tensor:
    """``kernels.recurrent.convolution.causal_convolution`` of CUDA tensors. ``x`` may be float32 or 16-bit."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (tokens, channels), width = x.shape, len(weight)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if tokens:
        _convolve[(triton.cdiv(channels, _CHANNELS), len(segments))](
            x, weight, weight if bias is None else bias, states, segments, out, channels, x.stride(0),
            WIDTH=width, ROWS=triton.next_power_of_2(width - 1), HAS_BIAS=bias is not None, ACTIVATE=activate,
            TOKENS=_TOKENS, BLOCK=_CHANNELS, num_warps=4,
        )  # fmt: skip
    return out
