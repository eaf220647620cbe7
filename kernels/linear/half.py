"""Matrix products with weights that stay in 16 bits on a CPU, and embedding tables of them."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.linear.half import PackedHalf
from kernels.linear.fp32 import WeightProduct


class HalfLinear(WeightProduct):
    """``x @ weight.T + bias`` for float32 ``x`` and a float16 or bfloat16 ``weight``.

    The result is, to the bit, that of ``Linear`` with the same numbers in float32.
    """

    def __init__(self, weight: Tensor | PackedHalf, bias: Tensor | None = None) -> None:
        """Keeps no reference to a tensor. ``weight``: ``[out, in]``, of a dtype that ``is_supported``."""
        self.packed = PackedHalf(weight) if isinstance(weight, Tensor) else weight
        super().__init__(self.packed.product, self.packed.shape.numel(), bias, is_kernel=True)


class HalfEmbedding:
    """A table of float16 or bfloat16 numbers, whose rows are float32."""

    def __init__(self, table: Tensor) -> None:
        """``table``: ``[vocab, hidden]``, of a dtype that ``is_supported``."""
        self._packed = PackedHalf(table)

    def __call__(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        return self._packed.read_rows(tokens, scale)

    def create_product(self) -> HalfLinear:
        return HalfLinear(self._packed)
