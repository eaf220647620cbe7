"""The recurrence of Mamba-2, token by token, with a part of a head's matrix in the registers of a warp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.recurrent.chunks import MIN_TOKENS, scan_chunks
from kernels.triton.recurrent.functions import count_chained, softplus
from kernels.triton.recurrent.parts import align_rows, choose_part


@triton.jit
def _scan(
    X, B, C, DT, RATES, BIAS, SKIPS, STATES, SEGMENTS, OUT, x_stride, b_stride, c_stride, dt_stride, slot_size, heads,
    repeats, state_size, head_dim, least, most,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MIN: tl.constexpr,
):  # fmt: skip
    head, first = tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < state_size, column < head_dim
    inside = is_row[:, None] & is_column[None, :]
    place = (head * state_size + row[:, None]) * head_dim + column[None, :]
    group_column, head_column = head // repeats * state_size + row, head * head_dim + column
    rate, bias, skip = tl.load(RATES + head), tl.load(BIAS + head), tl.load(SKIPS + head)
    state = tl.zeros([ROWS, COLUMNS], tl.float32)
    last = tl.full([], -2, tl.int64)  # the slot whose state is in the registers
    for index in range(first, first + count_chained(SEGMENTS, first, MIN, False)):
        start, end = tl.load(SEGMENTS + 5 * index), tl.load(SEGMENTS + 5 * index + 1)
        source, target = tl.load(SEGMENTS + 5 * index + 2), tl.load(SEGMENTS + 5 * index + 3)
        if start < end:
            if source != last:
                tl.debug_barrier()  # other threads may have written what is read of an earlier segment's state
                state = tl.load(STATES + source * slot_size + place, mask=inside & (source >= 0), other=0.0)
            for token in range(start, end):
                x = tl.load(X + token * x_stride + head_column, mask=is_column, other=0.0).to(tl.float32)
                b = tl.load(B + token * b_stride + group_column, mask=is_row, other=0.0).to(tl.float32)
                c = tl.load(C + token * c_stride + group_column, mask=is_row, other=0.0).to(tl.float32)
                step = softplus(tl.load(DT + token * dt_stride + head).to(tl.float32) + bias)
                # Comparisons, by which a step that is no number stays none.
                step = tl.where(step < least, least, step)
                step = tl.where(step > most, most, step)
                state = state * tl.exp(step * rate) + (step * b)[:, None] * x[None, :]
                out = (tl.sum(c[:, None] * state, axis=0) + skip * x).to(OUT.dtype.element_ty)
                tl.store(OUT + token * heads * head_dim + head_column, out, mask=is_column)
            tl.store(STATES + target * slot_size + place, state, mask=inside)
            last = target


def mamba2_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    constants: tuple[Tensor, Tensor, Tensor],
    limits: tuple[float, float],
    states: Tensor,
    segments: Tensor,
    *,
    in_chunks: bool,
) -> Tensor:
    """``kernels.recurrent.mamba2.mamba2_scan`` of CUDA tensors. The inputs of tokens may be 16-bit.

    ``constants`` and ``limits``: the tensors and the range of ``kernels.recurrent.mamba2.HeadConstants``.
    """
    (tokens, heads, head_dim), (groups, state_size) = x.shape, b.shape[1:]
    x, b, c = (align_rows(part) for part in (x, b, c))
    dt = dt if dt.stride(-1) == 1 else dt.contiguous()
    out = torch.empty(tokens, heads, head_dim, dtype=x.dtype, device=x.device)
    in_chunks = in_chunks and x.dtype == torch.bfloat16
    rows, columns = choose_part(state_size, head_dim)
    if tokens:
        _scan[(triton.cdiv(head_dim, columns), heads, len(segments))](
            x, b, c, dt, *constants, states, segments, out, x.stride(0), b.stride(0), c.stride(0),
            dt.stride(0), heads * state_size * head_dim, heads, heads // groups, state_size, head_dim, *limits,
            ROWS=rows, COLUMNS=columns, MIN=MIN_TOKENS if in_chunks else 0, num_warps=1,
        )  # fmt: skip
    if tokens and in_chunks:
        scan_chunks(x, b, c, dt, constants, limits, states, segments, out)
    return out
