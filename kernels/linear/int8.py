"""Matrix products on the CPU with int8 weights, and activations that are rounded to 8 bits row by row."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu import availability
from kernels.cpu.linear.int8 import PackedInt8
from kernels.linear.fp32 import WeightProduct

_MAX_COLUMNS = 1 << 16
"""With more columns a sum of products of bytes may not fit 32 bits."""


class Int8Linear(WeightProduct):
    """``x @ (codes * scales).T + bias`` with each row of ``x`` rounded to ``max|row| / 127 * {-127 … 127}``.

    Sums are exact integers, so each row of the result is, bit for bit, independent of the other rows. A quarter of
    ``Linear``'s bytes, and on a core with VNNI at 1 to 16 rows three and a half times as fast. Without it, exact sums
    take more instructions.
    """

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        """``codes``: int8 ``[out, in]``, ``scales``: float32 ``[out]``, ``bias``: float32 ``[out]``. Keeps no reference
        to ``codes``. Raises ``ValueError`` unless ``is_supported``."""
        if not is_supported(codes.shape[1]):
            raise ValueError(
                f"int8 products of {codes.shape[1]} columns are not supported on this machine; at most "
                f"{_MAX_COLUMNS} are, if it has AVX2 or ARM's dot products"
            )
        super().__init__(PackedInt8(codes, scales).product, codes.numel(), bias, is_kernel=True)


def is_supported(columns: int) -> bool:
    """Return True if this machine computes ``Int8Linear`` with that many columns."""
    return columns <= _MAX_COLUMNS and availability.HAS_BYTE_PRODUCTS
