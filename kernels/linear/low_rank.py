"""Low-rank updates of a product (LoRA): each row gets those of its own adapter.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1. Several adapters in one batch
are those of Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023: on the CPU a kernel looks each row's adapter up; on
a GPU, where ranks are narrow for its matrix units, two products with all adapters' matrices are masked by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.common.quantization import QuantizedRows, Rows
from kernels.cpu.layers.elementwise import contiguous
from kernels.cpu.linear import low_rank as on_cpu
from kernels.linear.fp32 import multiply_invariantly

_ALIGNMENT = 16
"""Ranks and sums of ranks are padded to a multiple, which vectors and matrix units take."""
NO_ADAPTER = -1
"""Index of the adapter of a row that has none."""


class LowRankUpdate(NamedTuple):
    """The update ``up @ down`` of some rows of a weight by one adapter."""

    adapter: int
    first: int
    """First row of the weight that it changes."""
    down: Tensor
    """float32 ``[rank, in]``: ``A`` in the papers."""
    up: Tensor
    """float32 ``[rows, rank]``: ``B`` in the papers, times the adapter's scale."""


class LowRankUpdates:
    """The updates of one weight ``[out, in]`` by all adapters.

    A row without an adapter keeps its bits. On the CPU, and on a GPU if ``is_batch_invariant``, no row depends, to the
    bit, on the others.
    """

    def __init__(
        self,
        updates: Sequence[LowRankUpdate],
        num_outputs: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        is_kernel: bool,
        is_batch_invariant: bool = False,
    ) -> None:
        """``is_kernel``: on the CPU, for float32: only launch kernels of ``kernels.cpu``."""
        self.parameters = sum(update.down.numel() + update.up.numel() for update in updates)
        self._is_batch_invariant = is_batch_invariant
        self.is_kernel = is_kernel
        if self.is_kernel:
            self._prepare_kernel(updates, num_outputs)
        else:
            self._prepare_products(updates, num_outputs, device, dtype)

    def _prepare_kernel(self, updates: Sequence[LowRankUpdate], num_outputs: int) -> None:
        self._matrices: list[Tensor] = []
        """The matrices that the table has the addresses of."""
        entries: list[list[int]] = []
        for update in updates:
            rows, rank = update.up.shape
            padding = -rank % _ALIGNMENT
            down = F.pad(update.down.T, (0, padding)).contiguous()
            up = F.pad(update.up.T, (update.first, num_outputs - update.first - rows, 0, padding)).contiguous()
            self._matrices += [down, up]
            entries.append([update.adapter, down.data_ptr(), up.data_ptr(), rank + padding, update.first, rows])
        self._table = torch.tensor(entries, dtype=torch.int64)
        self._max_rank = max(entry[3] for entry in entries)

    def _prepare_products(
        self, updates: Sequence[LowRankUpdate], num_outputs: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        total = sum(len(update.down) for update in updates)
        padding = -total % _ALIGNMENT
        down = F.pad(torch.cat([update.down for update in updates]), (0, 0, 0, padding))
        up, owners, start = torch.zeros(num_outputs, total + padding), [], 0
        for update in updates:
            rows, rank = update.up.shape
            up[update.first : update.first + rows, start : start + rank] = update.up
            owners += [update.adapter] * rank
            start += rank
        # A column of the padding belongs to no row, also not to one without an adapter.
        owners += [NO_ADAPTER - 1] * padding
        self._down, self._up = down.to(device, dtype), up.to(device, dtype)
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)

    def add(self, x: Rows, out: Tensor, indices: Tensor) -> Tensor:
        """Return ``out`` ``[rows, out]`` with the updates of each row of ``x`` ``[rows, in]`` added, perhaps in place.

        ``indices``: int64 ``[rows or more]``, each row's adapter, ``NO_ADAPTER`` for none.
        """
        rows = _dequantize(x)
        if self.is_kernel:
            on_cpu.add_updates(contiguous(rows), out, indices, self._table, self._max_rank)
            return out
        own = indices[: len(out), None]
        narrow = self._multiply(rows, self._down)
        narrow = torch.where(own == self._owners, narrow, torch.zeros((), dtype=narrow.dtype, device=narrow.device))
        return torch.where(own >= 0, out + self._multiply(narrow, self._up).to(out.dtype), out)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return multiply_invariantly(x, weight, None, x.dtype) if self._is_batch_invariant else F.linear(x, weight)


def _dequantize(x: Rows) -> Tensor:
    """Return rows as floats: those that were quantized for the weight are, for its updates, what their codes mean."""
    if not isinstance(x, QuantizedRows):
        return x
    scales = x.scales[:, None] if x.scales.dim() == 1 else x.scales
    codes = x.codes.float().view(*scales.shape, -1)
    return (codes * scales[..., None]).flatten(1).to(x.dtype)
