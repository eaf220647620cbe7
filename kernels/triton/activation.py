"""Gated activations, quantized or not, and gates of rows, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.quantization import LIMITS, Quantization, QuantizedRows, Rows
from kernels.triton.quantize import empty_codes, quantize_vectors, store_quantized

_BLOCK = 2048
_SILU, _GELU, _CLAMPED = range(3)
_MAX_ROW = 1 << 14
"""A longer row with one scale does not fit the registers of one program: a second kernel quantizes it."""


@triton.jit(do_not_specialize=["rows"])
def _gated(
    X, OUT, SCALES, rows, n, alpha, clamp,
    KIND: tl.constexpr, LIMIT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < n
    gate = tl.load(X + row * 2 * n + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * n + n + column, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if KIND == 1:
        # (1 + tanh(y)) / 2 is sigmoid(2 y), so that gelu is a gate times a sigmoid as silu is.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif KIND == 2:
        gate = tl.minimum(gate, clamp)
        up = tl.minimum(tl.maximum(up, -clamp), clamp) + 1.0
        slope = alpha * gate
    result = (gate * tl.sigmoid(slope) * up).to(X.dtype.element_ty)
    offset = row * n + column
    if LIMIT != 0:
        # Rounded before it is quantized, as two separate operators would.
        wide = result.to(tl.float32)[None, :]
        store_quantized(wide, OUT, SCALES, offset[None, :], inside[None, :], row, rows, first, n, LIMIT, SIZE, 1, BLOCK)
    else:
        tl.store(OUT + offset, result, mask=inside)


def silu_mul(gate_up: Tensor, quantization: Quantization | None = None) -> Rows:
    """``kernels.layers.activation.silu_mul`` of CUDA tensors."""
    return _launch(gate_up, quantization, _SILU)


def gelu_tanh_mul(gate_up: Tensor, quantization: Quantization | None = None) -> Rows:
    """``kernels.layers.activation.gelu_tanh_mul`` of CUDA tensors."""
    return _launch(gate_up, quantization, _GELU)


def clamped_silu_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """``kernels.layers.activation.clamped_silu_mul`` of CUDA tensors."""
    result = _launch(gate_up, None, _CLAMPED, alpha, limit)
    assert isinstance(result, Tensor)
    return result


def _launch(
    gate_up: Tensor, quantization: Quantization | None, kind: int, alpha: float = 1.0, clamp: float = 0.0
) -> Rows:
    gate_up = gate_up.contiguous()
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    if quantization is not None and quantization.block is None and n > _MAX_ROW:
        result = _launch(gate_up, None, kind, alpha, clamp)
        assert isinstance(result, Tensor)
        return QuantizedRows(*quantize_vectors(result, quantization.dtype, LIMITS[quantization.dtype]), result.dtype)
    limit, size, columns = 0.0, _BLOCK, _BLOCK
    if quantization is None:
        out = scales = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    else:
        # One program sees all values that share a scale.
        columns = triton.next_power_of_2(n) if quantization.block is None else _BLOCK
        limit, size = LIMITS[quantization.dtype], quantization.block or columns
        out, scales = empty_codes(rows, n, quantization, gate_up.device)
    if rows:
        _gated[(rows, triton.cdiv(n, columns))](
            gate_up, out, scales, rows, n, alpha, clamp, KIND=kind, LIMIT=limit, SIZE=size, BLOCK=columns,
            num_warps=max(4, columns // 1024),
        )  # fmt: skip
    return out if quantization is None else QuantizedRows(out, scales, gate_up.dtype)


@triton.jit
def _scale_rows(GATE, X, OUT, n, gate_stride, gate_step, x_stride, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    gate = tl.load(GATE + row * gate_stride + column * gate_step, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(X + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = gate * tl.sigmoid(gate) if SILU else tl.sigmoid(gate)
    tl.store(OUT + row * n + column, (factor * x).to(OUT.dtype.element_ty), mask=inside)


def scale_rows(gate: Tensor, x: Tensor, *, silu: bool) -> Tensor:
    """``kernels.layers.activation.silu_gate`` or ``kernels.layers.gate.sigmoid_mul`` of CUDA tensors."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        _scale_rows[(rows, triton.cdiv(n, _BLOCK))](
            gate, x, out, n, gate.stride(0), 0 if gate.shape[1] == 1 else gate.stride(1), x.stride(0),
            SILU=silu, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
