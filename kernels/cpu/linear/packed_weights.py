"""Matrix products with weights that are laid out once: what is the same for all kinds of numbers.

The weights lie in panels of ``WIDE`` outputs, each one stream of memory from beginning to end. The rows of ``x`` are
laid out in blocks, as a tile reads them, and every thread multiplies its share of the panels by all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.linear.gemm_tile import AHEAD, LINE, TALL, WIDE, multiplier
from kernels.cpu.runtime.kernel import Kernel, float32_array, function, split_range
from kernels.cpu.runtime.recorder import empty

_PART = 8 * TALL
"""Rows that take a panel one after the other while it is in the cache of the second level."""
_FREE = 4
"""Reading a weight takes as long as so many products."""


class Panels:
    """A weight ``[out, in]``, for products with many ``x``."""

    def __init__(
        self, kernel: Kernel, kind: str, shape: torch.Size, panels: Tensor, own: int | Tensor, *, row: int, alone: int
    ) -> None:
        """``kernel``: its body is what ``product_body`` made. ``panels``: ``[panels, ...]``. ``own``: an argument for
        the functions of this kind. ``row``: bytes of a row of x in a block, in fours. ``alone``: products that one
        thread computes before two would have begun."""
        self._kernel, self._kind, self._panels, self._own = kernel, kind, panels, own
        self._out, self._in = shape
        self._row, self._alone = row, alone

    def product(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """``x @ weight.T + bias + residual`` of ``x`` ``[rows, in]``, contiguous ``bias`` ``[out]`` and ``residual``
        ``[rows, out]``. Raises ``ValueError`` where a shape or a type is another."""
        rows, into = x.shape
        if into != self._in or x.dtype != torch.float32:
            raise ValueError(f"x is {x.dtype} {[*x.shape]}, the weight {self._kind} {[self._out, self._in]}")
        if residual is not None and (residual.shape != (rows, self._out) or residual.dtype != torch.float32):
            raise ValueError(f"the residual is {residual.dtype} {[*residual.shape]}, the product {[rows, self._out]}")
        out = empty(rows, self._out)
        if rows == 0:
            return out
        stride, one = x.stride()
        if one != 1:
            x, stride = x.contiguous(), self._in
        if residual is not None:
            residual = residual.contiguous()
        threads = 1 if max(rows, _FREE) * self._out * self._in < self._alone else torch.get_num_threads()
        parts = -(-rows // _PART)
        # Each thread's tile for the outputs at the right edge, and its copy of a part of x.
        room = 4 * TALL * WIDE + -(-rows // parts) * self._row
        scratch = empty(threads * room // 4)
        self._kernel(
            x.data_ptr(),
            self._panels.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            rows,
            self._in,
            self._out,
            stride,
            self._panels.stride(0) * self._panels.itemsize,
            self._row,
            parts,
            room,
            self._own,
            threads=threads,
        )
        return out


def product_body(pack: Any, tile: Callable[..., None], tall: int = TALL) -> Any:
    """``(arguments, thread, threads)``: a thread's share of a product.

    ``pack(to, x, rows, into, stride, own, ahead)`` lays out a block of x and may ask meanwhile for weights at
    ``ahead``. ``tile(builder, rows, target, x, panel, own, fetch)`` generates the instructions that write the product
    of a block of so many rows and a panel; ``target``: see ``tile.write``, ``fetch``: see ``tile.tile``. ``tall``: the
    most rows of a block.
    """
    multiply = multiplier(tile, tall)

    @function
    def multiply_panels(a: Any, thread: int, threads: int) -> None:
        x, weights, bias, residual, result, scratch, rows, into = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
        out, stride, size, row, parts, room, own = a[8], a[9], a[10], a[11], a[12], a[13], a[14]
        panels = (out + WIDE - 1) // WIDE
        edge = scratch + thread * room
        packed = edge + 4 * TALL * WIDE
        item, end = split_range(parts * panels, thread, threads)
        while item < end:
            # The panels of one part of the rows that are this thread's.
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
                    offset = 4 * ((top + low) * out + panel * WIDE)
                    to_residual = residual + offset if residual else 0
                    start = weights + panel * size
                    # Only the first block's product waits for memory. All of them ask for the next panel, each for its
                    # part: were it the first alone, the memory would rest meanwhile.
                    ahead, apart = start + AHEAD + size + (block - 1) * size // blocks, LINE // blocks
                    if panel == last - 1 and block:
                        apart = 0
                    x_at = packed + low * row
                    if wide == WIDE:
                        to = result + offset
                        multiply(high - low, to, 4 * out, to_bias, to_residual, x_at, start, own, ahead, apart)
                    else:
                        multiply(high - low, edge, 4 * WIDE, 0, 0, x_at, start, own, ahead, apart)
                        for at in range(low, high):
                            there = result + offset + 4 * (at - low) * out
                            _finish(there, edge + 4 * (at - low) * WIDE, to_bias, to_residual, wide)
                            to_residual += 4 * out if residual else 0

    return multiply_panels


@function
def _finish(to: int, edge: int, bias: int, residual: int, wide: int) -> None:
    """Writes a row's outputs of the last panel, those that there are."""
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
