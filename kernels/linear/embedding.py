"""Embedding tables."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.cpu.availability import can_use_kernels
from kernels.cpu.linear.ggml.packed import PackedBlocks
from kernels.cpu.sampling.draft_chain import gather_rows
from kernels.linear.blocks import BlockLinear
from kernels.linear.fp32 import Linear, Product


class Embedding(Protocol):
    """An embedding table ``[vocab, hidden]`` of any type and layout."""

    def __call__(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        """Return the rows of tokens times ``scale``, ``[tokens, hidden]``. On the CPU it only launches a kernel."""
        ...

    def create_product(self) -> Product:
        """Return the product with the table as a weight, which shares its memory where it can."""
        ...


class EmbeddingTable:
    """A table of floats."""

    def __init__(self, table: Tensor, *, is_batch_invariant: bool = False) -> None:
        """``is_batch_invariant``: of the product, see ``Linear``."""
        self._table = table.contiguous()
        self._is_batch_invariant = is_batch_invariant

    def __call__(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        if can_use_kernels(self._table):
            return gather_rows(self._table, tokens, scale=scale)
        rows = self._table[tokens]
        return rows if scale == 1 else rows * scale

    def create_product(self) -> Product:
        return Linear(self._table, is_batch_invariant=self._is_batch_invariant)


class BlockEmbedding:
    """A table in a block format of GGUF files."""

    def __init__(self, blocks: PackedBlocks) -> None:
        self._blocks = blocks

    def __call__(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        return self._blocks.read_rows(tokens, scale)

    def create_product(self) -> Product:
        return BlockLinear([self._blocks])
