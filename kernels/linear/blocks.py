"""Products with weights in the block formats of GGUF files, whose bits are kept, and embedding tables of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.cpu import availability
from kernels.cpu.linear.ggml.packed import PackedBlocks, needs_compiling
from kernels.cpu.runtime.recorder import empty
from kernels.linear.fp32 import WeightProduct


def is_supported() -> bool:
    """Return True if this processor has the instructions: AVX2 with FMA and F16C, AVX-512, or ARM's dot products."""
    return availability.HAS_BYTE_PRODUCTS


def find_uncompiled(formats: Sequence[str]) -> list[str]:
    """Return the formats whose kernels this machine compiles at their first use, which takes some seconds each."""
    return [name for name in formats if needs_compiling(name)]


class BlockLinear(WeightProduct):
    """``x @ weight.T + bias`` for a weight whose rows may have several formats.

    Each group of 32 columns of each row of ``x`` is rounded to ``max|group| / 127 * {-127 … 127}``, and the products
    within a group are exact integers. Each row of the result is, bit for bit, independent of the other rows.
    """

    def __init__(self, parts: Sequence[PackedBlocks], bias: Tensor | None = None) -> None:
        """``parts``: weights of the same columns, one below the other."""
        self._parts, self._num_rows = parts, sum(part.shape[0] for part in parts)
        num_weights = sum(part.shape.numel() for part in parts)
        super().__init__(
            parts[0].product if len(parts) == 1 else self._multiply_parts, num_weights, bias, is_kernel=True
        )

    def _multiply_parts(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        result, start = empty(len(x), self._num_rows), 0
        for part in self._parts:
            rows = slice(start, start + part.shape[0])
            added = None if bias is None else bias[rows], None if residual is None else residual[:, rows]
            part.product(x, *added, result[:, rows])
            start = rows.stop
        return result
