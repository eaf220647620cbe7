"""Matrix products with weights that are packed once: the part that all types of weights share.

The weights lie in panels of ``WIDE`` outputs, each one stream of memory. The rows of ``x`` are packed in blocks, in the
order in which a tile reads them, and each thread multiplies its panels by all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.linear.gemm_tile import CACHE_LINE, PREFETCH_BYTES, TALL, WIDE, multiplier
from kernels.cpu.runtime.kernel import Kernel, float32_array, function, int64_array, named_function, split_range
from kernels.cpu.runtime.recorder import empty

_ROWS_PER_PART = 8 * TALL
"""Rows that are multiplied by a panel while it is in the second-level cache."""
_PRODUCT_ARGUMENTS = 16
"""Arguments of the function that ``product_body`` makes."""
_PRODUCTS_PER_READ = 4
"""Reading a weight takes as long as this many products."""


class PackedWeights:
    """A packed weight ``[out, in]``."""

    def __init__(
        self,
        kernel: Kernel,
        type_name: str,
        shape: torch.Size,
        panels: Tensor,
        own: int | Tensor,
        *,
        row: int,
        min_parallel: int,
        experts_kernel: Kernel | None = None,
    ) -> None:
        """``kernel``: its body is made by ``product_body``. ``panels``: ``[panels, ...]``.

        ``own``: an argument of the functions of this type. ``row``: bytes of a row of x in a block, a multiple of 4.
        ``min_parallel``: products from which on more than one thread is used. ``experts_kernel``: its body is made by
        ``experts_body``.
        """
        self._kernel, self.type_name, self._panels, self._own = kernel, type_name, panels, own
        self.shape = shape
        self._out, self._in = shape
        self._row, self._min_parallel = row, min_parallel
        self.experts_kernel = experts_kernel

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self._panels.numel() * self._panels.itemsize

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, result: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias + residual``.

        ``x``: ``[rows, in]``; ``bias``: ``[out]``, contiguous; ``residual``: ``[rows, out]``; all float32. ``result``:
        float32 ``[rows, out]`` to write to, whose rows may lie apart; those of ``residual`` then lie as far apart.
        Raises ``ValueError`` if a shape or type of ``x`` or ``residual`` is wrong.
        """
        rows, into = x.shape
        if into != self._in or x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype} {[*x.shape]}, the weight {self.type_name} {[self._out, self._in]}")
        if residual is not None and (residual.shape != (rows, self._out) or residual.dtype != torch.float32):
            raise ValueError(f"the residual is {residual.dtype} {[*residual.shape]}, the product {[rows, self._out]}")
        out = empty(rows, self._out) if result is None else result
        if rows == 0:
            return out
        stride, column_stride = x.stride()
        if column_stride != 1:
            x, stride = x.contiguous(), self._in
        if residual is not None and residual.stride() != out.stride():
            residual = residual.contiguous()
        is_small = max(rows, _PRODUCTS_PER_READ) * self._out * self._in < self._min_parallel
        threads = 1 if is_small else torch.get_num_threads()
        parts = -(-rows // _ROWS_PER_PART)
        # For each thread a tile for the outputs at the right edge, and a packed part of x.
        thread_bytes = 4 * TALL * WIDE + -(-rows // parts) * self._row
        scratch = empty(threads * thread_bytes // 4)
        self._kernel(
            x,
            self._panels,
            0 if bias is None else bias,
            0 if residual is None else residual,
            out,
            scratch,
            rows,
            self._in,
            self._out,
            stride,
            self._panels.stride(0) * self._panels.itemsize,
            self._row,
            parts,
            thread_bytes,
            self._own,
            out.stride(0),
            threads=threads,
        )
        return out


class ExpertWeights:
    """The packed weights ``[out, in]`` of several experts, for one kernel."""

    def __init__(self, weights: Sequence[PackedWeights], biases: Sequence[Tensor | None]) -> None:
        """For weights that ``can_compute_together``."""
        self._weights, self._biases = weights, biases
        rows = [
            [weight._panels.data_ptr(), 0 if bias is None else bias.data_ptr(), _read_word(weight._own)]
            for weight, bias in zip(weights, biases, strict=True)
        ]
        self._table = torch.tensor(rows, dtype=torch.int64)

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return ``[rows, out]`` of ``x``, contiguous ``[rows, in]``, of which the rows from ``ends[i]`` to before
        ``ends[i + 1]`` are multiplied by the weight with index ``i``. ``ends``: int64 ``[experts + 1]``."""
        rows, first = len(x), self._weights[0]
        num_out, num_in = first.shape
        out = empty(rows, num_out)
        is_small = max(rows, _PRODUCTS_PER_READ) * num_out * num_in < first._min_parallel
        threads = 1 if is_small else torch.get_num_threads()
        thread_bytes = 4 * TALL * WIDE + min(rows, _ROWS_PER_PART) * first._row
        # For each thread also the arguments of the product with one expert.
        scratch = empty(threads * (thread_bytes // 4 + 2 * _PRODUCT_ARGUMENTS))
        kernel = first.experts_kernel
        assert kernel is not None
        kernel(
            x,
            self._table,
            ends,
            out,
            scratch,
            len(self._weights),
            num_in,
            num_out,
            first._panels.stride(0) * first._panels.itemsize,
            first._row,
            thread_bytes,
            threads=threads,
        )
        return out


def can_compute_together(weights: Sequence[PackedWeights]) -> bool:
    """Return True if ``ExpertWeights`` takes these weights: all in one layout that has such a kernel."""
    layouts = {(weight.experts_kernel, weight.shape, weight._panels.stride(0), weight._row) for weight in weights}
    return len(layouts) == 1 and weights[0].experts_kernel is not None


def _read_word(own: int | Tensor) -> int:
    return own if isinstance(own, int) else own.data_ptr()


def experts_body(name: str, body: Any) -> Any:
    """Make a function ``(arguments, thread, threads)`` that does a thread's part of the products of all experts.

    ``body``: made by ``product_body``; ``name``: as there. Arguments ``(x, weights, ends, result, scratch, experts, in,
    out, size of a panel, row, thread_bytes)``, with ``weights`` ``[experts, 3]``: panels, bias and own argument.
    """

    @named_function(f"multiply_experts_{name}")
    def multiply_experts(a: Any, thread: int, threads: int) -> None:
        experts, into, out, size, row, thread_bytes = a[5], a[6], a[7], a[8], a[9], a[10]
        weights, ends = int64_array(a[1], (experts, 3)), int64_array(a[2], experts + 1)
        words = int64_array(a[4] + threads * thread_bytes + 8 * _PRODUCT_ARGUMENTS * thread, _PRODUCT_ARGUMENTS)
        for expert in range(experts):
            first, rows = ends[expert], ends[expert + 1] - ends[expert]
            if rows == 0:
                continue
            words[0], words[1], words[2], words[3] = a[0] + 4 * first * into, weights[expert, 0], weights[expert, 1], 0
            words[4], words[5], words[6], words[7] = a[3] + 4 * first * out, a[4], rows, into
            words[8], words[9], words[10], words[11] = out, into, size, row
            words[12] = (rows + _ROWS_PER_PART - 1) // _ROWS_PER_PART
            words[13], words[14], words[15] = thread_bytes, weights[expert, 2], out
            body(words, thread, threads)

    return multiply_experts


def product_body(name: str, pack: Any, tile: Callable[..., None], tall: int = TALL) -> Any:
    """Make a function ``(arguments, thread, threads)`` that does a thread's part of a product.

    ``name``: that of the type of weights, which no other has.
    ``pack(to, x, rows, into, stride, own, ahead)`` packs a block of x; it may prefetch weights at ``ahead``.
    ``tile(builder, rows, target, x, panel, own, prefetching)`` generates the instructions that write the product of a
    block of ``rows`` rows and a panel; ``target``: see ``write_tile``, ``prefetching``: see ``sum_tile``. ``tall``: the
    most rows of a block.
    """
    multiply = multiplier(tile, tall)

    @named_function(f"multiply_panels_{name}")
    def multiply_panels(a: Any, thread: int, threads: int) -> None:
        x, weights, bias, residual, result, scratch, rows, into = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
        out, stride, size, row, parts, thread_bytes, own = a[8], a[9], a[10], a[11], a[12], a[13], a[14]
        out_stride = a[15]
        panels = (out + WIDE - 1) // WIDE
        edge = scratch + thread * thread_bytes
        packed = edge + 4 * TALL * WIDE
        item, end = split_range(parts * panels, thread, threads)
        while item < end:
            # This thread's panels of one part of the rows.
            part, first = item // panels, item % panels
            last = min(panels, first + end - item)
            item += last - first
            top, bottom = split_range(rows, part, parts)
            blocks = (bottom - top + tall - 1) // tall
            for block in range(blocks):
                low, high = split_range(bottom - top, block, blocks)
                start = weights + first * size + block * size // blocks
                pack(packed + low * row, x + 4 * (top + low) * stride, high - low, into, stride, own, start)
            for panel in range(first, last):
                wide = min(WIDE, out - panel * WIDE)
                to_bias = bias + 4 * panel * WIDE if bias else 0
                for block in range(blocks):
                    low, high = split_range(bottom - top, block, blocks)
                    offset = 4 * ((top + low) * out_stride + panel * WIDE)
                    to_residual = residual + offset if residual else 0
                    start = weights + panel * size
                    # Only the first block's product waits for memory. Each block prefetches its part of the next panel,
                    # so that the memory is busy all the time.
                    ahead = start + PREFETCH_BYTES + size + (block - 1) * size // blocks
                    prefetch = CACHE_LINE // blocks
                    if panel == last - 1 and block:
                        prefetch = 0
                    x_at = packed + low * row
                    if wide == WIDE:
                        target = result + offset
                        multiply(
                            high - low, target, 4 * out_stride, to_bias, to_residual, x_at, start, own, ahead, prefetch
                        )
                    else:
                        multiply(high - low, edge, 4 * WIDE, 0, 0, x_at, start, own, ahead, prefetch)
                        for index in range(high - low):
                            target = result + offset + 4 * index * out_stride
                            _write_edge(target, edge + 4 * index * WIDE, to_bias, to_residual, wide)
                            to_residual += 4 * out_stride if residual else 0

    return multiply_panels


@function
def _write_edge(to: int, edge: int, bias: int, residual: int, wide: int) -> None:
    """Write the ``wide`` outputs of a row that the last panel has."""
    target, source = float32_array(to, (wide,)), float32_array(edge, (wide,))
    for i in range(wide):
        target[i] = source[i]
    if bias:
        summand = float32_array(bias, (wide,))
        for i in range(wide):
            target[i] += summand[i]
    if residual:
        summand = float32_array(residual, (wide,))
        for i in range(wide):
            target[i] += summand[i]
