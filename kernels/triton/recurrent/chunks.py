"""Long segments in chunks of tokens, by products of matrices: the functions of one token after the other.

Within a chunk a token reads the state before the chunk, decayed, and what earlier tokens of the chunk have written.
The inputs of tokens are bfloat16, and float32 numbers are split into two of these, so that products have sixteen bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.recurrent.functions import count_chained, softplus

MIN_TOKENS = 32
"""Tokens of the longest segment of a chain from which on it is computed in chunks; other chains go token by token."""
_SCAN_CHUNK, _DELTA_CHUNK = 32, 16
"""Tokens of a chunk: with more of them registers are spilled, of Mamba-2 with half as many if its states are large."""
_LARGE_ROWS = 256
_WARPS = 8
_COLUMNS = 32
"""Columns of a head's matrix that a program computes."""


@triton.jit
def _split(x):
    """Return two bfloat16 numbers for each float32 number, whose sum it is to sixteen bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _multiply(x, y):
    """Return the product of a bfloat16 and a float32 matrix."""
    high, low = _split(y)
    return tl.dot(x, low, tl.dot(x, high))


@triton.jit
def _multiply_left(x, y):
    """Return the product of a float32 and a bfloat16 matrix."""
    high, low = _split(x)
    return tl.dot(low, y, tl.dot(high, y))


@triton.jit
def _multiply_wide(x, y):
    """Return the product of two float32 matrices."""
    x_high, x_low = _split(x)
    y_high, y_low = _split(y)
    return tl.dot(x_high, y_low, tl.dot(x_low, y_high, tl.dot(x_high, y_high)))


@triton.jit
def _scan_chunks(
    X, B, C, DT, RATES, BIAS, SKIPS, STATES, SEGMENTS, OUT, x_stride, b_stride, c_stride, dt_stride, slot_size, heads,
    repeats, state_size, head_dim, least, most,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, MIN: tl.constexpr,
):  # fmt: skip
    head, first = tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < state_size, column < head_dim
    inside = is_row[:, None] & is_column[None, :]
    place = (head * state_size + row[:, None]) * head_dim + column[None, :]
    group_column, head_column = head // repeats * state_size + row, head * head_dim + column
    rate, bias, skip = tl.load(RATES + head), tl.load(BIAS + head), tl.load(SKIPS + head)
    line = tl.arange(0, CHUNK)
    state = tl.zeros([ROWS, COLUMNS], tl.float32)
    last = tl.full([], -2, tl.int64)  # the slot whose state is in the registers
    for index in range(first, first + count_chained(SEGMENTS, first, MIN, True)):
        start, end = tl.load(SEGMENTS + 5 * index), tl.load(SEGMENTS + 5 * index + 1)
        source, target = tl.load(SEGMENTS + 5 * index + 2), tl.load(SEGMENTS + 5 * index + 3)
        if start < end:
            if source != last:
                tl.debug_barrier()  # other threads may have written what is read of an earlier segment's state
                state = tl.load(STATES + source * slot_size + place, mask=inside & (source >= 0), other=0.0)
            for begin in range(start, end, CHUNK):
                is_token = line < end - begin
                step = softplus(
                    tl.load(DT + begin * dt_stride + line * dt_stride + head, mask=is_token, other=0.0).to(tl.float32)
                    + bias
                )
                # Comparisons, by which a step that is no number stays none.
                step = tl.where(step < least, least, step)
                step = tl.where(step > most, most, step)
                step = tl.where(is_token, step, 0.0)
                total = tl.cumsum(step * rate, axis=0)
                whole = tl.sum(step * rate, axis=0)
                seen = is_token[:, None] & is_row[None, :]
                b = tl.load(
                    B + begin * b_stride + (line[:, None] * b_stride + group_column[None, :]), mask=seen, other=0.0
                )
                c = tl.load(
                    C + begin * c_stride + (line[:, None] * c_stride + group_column[None, :]), mask=seen, other=0.0
                )
                seen = is_token[:, None] & is_column[None, :]
                x = tl.load(
                    X + begin * x_stride + (line[:, None] * x_stride + head_column[None, :]), mask=seen, other=0.0
                )
                weight = tl.exp(total[:, None] - total[None, :]) * step[None, :]
                # Behind a token exponentials may be infinite, or no numbers.
                scores = tl.where(line[:, None] >= line[None, :], tl.dot(c, tl.trans(b)) * weight, 0.0)
                out = _multiply_left(scores, x) + _multiply(c, state) * tl.exp(total)[:, None] + skip * x.to(tl.float32)
                rows = OUT + begin * heads * head_dim + line[:, None] * heads * head_dim
                tl.store(rows + head_column[None, :], out.to(OUT.dtype.element_ty), mask=seen)
                written = x.to(tl.float32) * (tl.exp(whole - total) * step)[:, None]
                state = state * tl.exp(whole) + _multiply(tl.trans(b), written)
            tl.store(STATES + target * slot_size + place, state, mask=inside)
            last = target


def scan_chunks(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    constants: tuple[Tensor, Tensor, Tensor],
    limits: tuple[float, float],
    states: Tensor,
    segments: Tensor,
    out: Tensor,
) -> None:
    """Compute the long chains of ``kernels.triton.recurrent.mamba2.mamba2_scan`` into ``out``."""
    (_, heads, head_dim), (groups, state_size) = x.shape, b.shape[1:]
    rows = max(16, triton.next_power_of_2(state_size))
    _scan_chunks[(triton.cdiv(head_dim, _COLUMNS), heads, len(segments))](
        x, b, c, dt, *constants, states, segments, out, x.stride(0), b.stride(0), c.stride(0), dt.stride(0),
        heads * state_size * head_dim, heads, heads // groups, state_size, head_dim, *limits,
        ROWS=rows, COLUMNS=_COLUMNS, CHUNK=_SCAN_CHUNK if rows < _LARGE_ROWS else _SCAN_CHUNK // 2, MIN=MIN_TOKENS,
        num_warps=_WARPS, num_stages=1,
    )  # fmt: skip


@triton.jit
def _invert(lower, SIZE: tl.constexpr):
    """Return the inverse of the unit matrix plus a matrix that has zeros in and above its diagonal.

    Row by row, which grows no errors: powers of the matrix may be as large as binomial coefficients.
    """
    line = tl.arange(0, SIZE)
    is_diagonal = line[:, None] == line[None, :]
    inverse = tl.where(is_diagonal, 1.0, 0.0)
    for number in range(1, SIZE):
        is_own = (line == number)[:, None]
        factors = tl.sum(tl.where(is_own, lower, 0.0), axis=0)
        inverse = tl.where(is_own & ~is_diagonal, -tl.sum(factors[:, None] * inverse, axis=0)[None, :], inverse)
    return inverse


@triton.jit
def _delta_chunks(
    Q, K, V, DECAY, BETA, STATES, SEGMENTS, OUT, q_stride, k_stride, v_stride, slot_size, heads, repeats, key_dim,
    value_dim, scale, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, MIN: tl.constexpr,
):  # fmt: skip
    head, first = tl.program_id(1), tl.program_id(2)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < key_dim, value < value_dim
    inside = is_key[:, None] & is_value[None, :]
    place = (head * key_dim + key[:, None]) * value_dim + value[None, :]
    key_column, value_column = head // repeats * key_dim + key, head * value_dim + value
    line = tl.arange(0, CHUNK)
    is_behind = line[:, None] > line[None, :]
    state = tl.zeros([KEYS, VALUES], tl.float32)
    last = tl.full([], -2, tl.int64)  # the slot whose state is in the registers
    for index in range(first, first + count_chained(SEGMENTS, first, MIN, True)):
        start, end = tl.load(SEGMENTS + 5 * index), tl.load(SEGMENTS + 5 * index + 1)
        source, target = tl.load(SEGMENTS + 5 * index + 2), tl.load(SEGMENTS + 5 * index + 3)
        if start < end:
            if source != last:
                tl.debug_barrier()  # other threads may have written what is read of an earlier segment's state
                state = tl.load(STATES + source * slot_size + place, mask=inside & (source >= 0), other=0.0)
            for begin in range(start, end, CHUNK):
                is_token = line < end - begin
                decay = tl.load(DECAY + begin * heads + line * heads + head, mask=is_token, other=0.0)
                beta = tl.load(BETA + begin * heads + line * heads + head, mask=is_token, other=0.0)
                total, whole = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
                seen = is_token[:, None] & is_key[None, :]
                k = tl.load(
                    K + begin * k_stride + (line[:, None] * k_stride + key_column[None, :]), mask=seen, other=0.0
                )
                key_factor = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1) + eps)
                # Behind a token exponentials may be infinite, or no numbers.
                fading = tl.exp(total[:, None] - total[None, :]) * key_factor[None, :]
                overlap = tl.dot(k, tl.trans(k)) * fading * (key_factor * beta)[:, None]
                overlap = tl.where(is_behind, overlap, 0.0)
                seen_v = is_token[:, None] & is_value[None, :]
                v = tl.load(
                    V + begin * v_stride + (line[:, None] * v_stride + value_column[None, :]), mask=seen_v, other=0.0
                )
                held = _multiply(k, state) * (tl.exp(total) * key_factor)[:, None]
                # What each token writes under its key, of which it takes what earlier ones have written there.
                change = _multiply_wide(_invert(overlap, CHUNK), (v.to(tl.float32) - held) * beta[:, None])
                q = tl.load(
                    Q + begin * q_stride + (line[:, None] * q_stride + key_column[None, :]), mask=seen, other=0.0
                )
                factor = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1) + eps) * scale
                scores = tl.where(line[:, None] >= line[None, :], tl.dot(q, tl.trans(k)) * fading, 0.0)
                out = (_multiply(q, state) * tl.exp(total)[:, None] + _multiply_wide(scores, change)) * factor[:, None]
                rows = OUT + begin * heads * value_dim + line[:, None] * heads * value_dim
                tl.store(rows + value_column[None, :], out.to(OUT.dtype.element_ty), mask=seen_v)
                state = state * tl.exp(whole) + _multiply(
                    tl.trans(k), change * (tl.exp(whole - total) * key_factor)[:, None]
                )
            tl.store(STATES + target * slot_size + place, state, mask=inside)
            last = target


def delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    segments: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """Compute the long chains of ``kernels.triton.recurrent.gated_delta.gated_delta`` into ``out``."""
    (_, heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[1:]
    _delta_chunks[(triton.cdiv(value_dim, _COLUMNS), heads, len(segments))](
        q, k, v, decay, beta, states, segments, out, q.stride(0), k.stride(0), v.stride(0),
        heads * key_dim * value_dim, heads, heads // key_heads, key_dim, value_dim, key_dim**-0.5, eps,
        KEYS=max(16, triton.next_power_of_2(key_dim)), VALUES=_COLUMNS, CHUNK=_DELTA_CHUNK, MIN=MIN_TOKENS,
        num_warps=_WARPS, num_stages=1,
    )  # fmt: skip
