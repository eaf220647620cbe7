"""Matrix products on the CPU with int8 weights, and activations that are rounded to 8 bits row by row."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from kernels.cpu import availability
from kernels.cpu.linear.int8 import PackedInt8
from kernels.linear.fp32 import WeightProduct

_LEVELS = 127
_TINY = 1e-30
"""Divisor of a row of zeros."""
_MAX_COLUMNS = 1 << 16
"""With more columns a sum of products of bytes may not fit 32 bits."""


class Int8Linear(WeightProduct):
    """``x @ (codes * scales).T + bias`` with each row of ``x`` rounded to ``max|row| / 127 * {-127 … 127}``.

    Sums are exact integers, so each row of the result is, bit for bit, independent of the other rows. A quarter of
    ``Linear``'s bytes, and on a core with VNNI at 1 to 16 rows three and a half times as fast.
    """

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        """``codes``: int8 ``[out, in]``, ``scales``: float32 ``[out]``, ``bias``: float32 ``[out]``. Keeps no reference
        to ``codes``. Raises ``ValueError`` unless ``is_supported``."""
        if not is_supported(codes.shape[1]):
            raise ValueError(
                f"int8 products of {codes.shape[1]} columns are not supported on this machine; at most "
                f"{_MAX_COLUMNS} are, if it has VNNI or FBGEMM"
            )
        packed = (PackedInt8 if availability.HAS_INT8_DOT else _Fbgemm)(codes, scales)
        super().__init__(packed.product, codes.numel(), bias, is_kernel=availability.HAS_INT8_DOT)


def is_supported(columns: int) -> bool:
    """Return True if this machine computes ``Int8Linear`` with that many columns."""
    return columns <= _MAX_COLUMNS and (
        availability.HAS_INT8_DOT or "fbgemm" in torch.backends.quantized.supported_engines
    )


class _Fbgemm:
    """FBGEMM's product, the fastest of torch's int8 operators for any number of rows.

    It takes float rows and rounds them as it packs them, with one scale for all rows, so each row is divided by its own
    maximum first.
    """

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self._packed = _pack(codes, scales)
        self._product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        size = x.abs().amax(1, keepdim=True).clamp_min_(_TINY)
        out: Tensor = self._product(x / size, 1 / _LEVELS, _LEVELS + 1, self._packed).mul_(size)
        for summand in (bias, residual):
            if summand is not None:
                out.add_(summand)
        return out


def _pack(codes: Tensor, scales: Tensor) -> object:
    zeros = torch.zeros(len(codes), dtype=torch.int64)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            # torch warns that quantized tensors are deprecated. This one is only needed for packing.
            warnings.simplefilter("ignore")
            weight = torch._make_per_channel_quantized_tensor(codes.contiguous(), scales.double(), zeros, 0)
        packed: object = torch.ops.quantized.linear_prepack(weight, None)
    finally:
        torch.backends.quantized.engine = engine
    return packed
