"""RMSNorm of the rows of a matrix, alone or after a residual sum, in one pass over memory, quantized or not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.quantization import LIMITS, Quantization, QuantizedRows, Rows
from kernels.triton.quantize import empty_codes, store_quantized

_TILE = 2048
"""Values of several short rows that one program normalises."""
_MAX_ROW = 1 << 16
"""A longer row does not fit the registers of one program."""


# The same code for every number of rows, so that no row depends on it.
@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    X, RESIDUAL, WEIGHT, SUM, OUT, SCALES, rows, heads, n, token_stride, head_stride, weight_stride, eps,
    ADD: tl.constexpr, LIMIT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < n)
    token, head = row // heads, row % heads
    dense = row * n + column
    x = tl.load(X + token * token_stride + head * head_stride + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(RESIDUAL + dense, mask=inside, other=0.0)
        # Rounded before it is normalised, as two separate operators would.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(SUM + dense, x, mask=inside)
    x = x.to(tl.float32)
    weight = tl.load(WEIGHT + head * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / n + eps)
    normed = (x * scale * weight).to(X.dtype.element_ty)
    if LIMIT != 0:
        # Rounded before it is quantized, as two separate operators would.
        store_quantized(
            normed.to(tl.float32), OUT, SCALES, dense, inside, first, rows, 0, n, LIMIT, SIZE, ROWS, COLUMNS
        )
    else:
        tl.store(OUT + dense, normed, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, quantization: Quantization | None = None) -> Rows:
    """``kernels.layers.norm.rms_norm`` of CUDA tensors."""
    return _launch(x, None, weight, eps, quantization)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantization: Quantization | None = None
) -> tuple[Rows, Tensor]:
    """``kernels.layers.norm.add_rms_norm`` of CUDA tensors."""
    return _launch(x, residual, weight, eps, quantization)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, quantization: Quantization | None
) -> tuple[Rows, Tensor]:
    n = x.shape[-1]
    if n > _MAX_ROW:
        raise ValueError(f"rows of {n} values; at most {_MAX_ROW} can be normalised")
    # [tokens, heads, n]: a view if the heads of a token lie together in a wider tensor.
    cube = x if x.dim() == 3 and x.stride(-1) == 1 else x.reshape(-1, weight.shape[0] if weight.dim() == 2 else 1, n)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(n)
    limit, size = 0.0, columns
    if quantization is None:
        out = scales = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        limit, size = LIMITS[quantization.dtype], quantization.block or columns
        out, scales = empty_codes(len(x), n, quantization, x.device)
    rows = max(1, _TILE // columns)
    count = cube.shape[0] * cube.shape[1]
    if count:
        _rms_norm[(triton.cdiv(count, rows),)](
            cube, cube if residual is None else residual.contiguous(), weight, out if total is None else total, out,
            scales, count, cube.shape[1], n,
            cube.stride(0), cube.stride(1), weight.stride(0) if weight.dim() == 2 else 0, eps,
            ADD=residual is not None, LIMIT=limit, SIZE=size, ROWS=rows, COLUMNS=columns,
            num_warps=min(16, max(1, rows * columns // 512)),
        )  # fmt: skip
    return out if quantization is None else QuantizedRows(out, scales, x.dtype), out if total is None else total
