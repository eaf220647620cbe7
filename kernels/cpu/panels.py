"""Matrix products with weights that are laid out once: what is the same for all kinds of numbers.

The weights lie in panels of ``WIDE`` outputs, each one stream of memory from beginning to end. The rows of ``x`` are
laid out in blocks, as a tile reads them, and every thread multiplies its share of the panels by all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.launch import Kernel, floats, function, share
from kernels.cpu.tape import empty
from kernels.cpu.tile import AHEAD, LINE, TALL, WIDE, multiplier

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

    ``pack(to, x, rows, into, stride, own)`` lays out a block of x. ``tile(builder, rows, to, stride, x, panel, own,
    fetch)`` generates the instructions that write the product of a block of so many rows and a panel, in rows that
    begin ``stride`` bytes apart; ``fetch``: see ``tile.tile``. ``tall``: the most rows of a block.
    """
    multiply = multiplier(tile, tall)

    @function
    def multiply_panels(a: Any, thread: int, threads: int) -> None:
        x, weights, bias, residual, result, scratch, rows, into = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
        out, stride, size, row, parts, room, own = a[8], a[9], a[10], a[11], a[12], a[13], a[14]
        panels = (out + WIDE - 1) // WIDE
        edge = scratch + thread * room
        packed = edge + 4 * TALL * WIDE
        item, end = share(parts * panels, thread, threads)
        while item < end:
            # The panels of one part of the rows that are this thread's.
            part, first = item // panels, item % panels
            last = min(panels, first + end - item)
            item += last - first
            top, bottom = share(rows, part, parts)
            blocks = (bottom - top + tall - 1) // tall
            for block in range(blocks):
                low, high = share(bottom - top, block, blocks)
                pack(packed + low * row, x + 4 * (top + low) * stride, high - low, into, stride, own)
            for panel in range(first, last):
                wide = min(WIDE, out - panel * WIDE)
                for block in range(blocks):
                    low, high = share(bottom - top, block, blocks)
                    offset = 4 * ((top + low) * out + panel * WIDE)
                    to, to_stride = (result + offset, 4 * out) if wide == WIDE else (edge, 4 * WIDE)
                    start = weights + panel * size
                    # Only the first block's product waits for memory. All of them ask for the next panel, each for its
                    # part: were it the first alone, the memory would rest meanwhile.
                    ahead = start + AHEAD + size + (block - 1) * size // blocks
                    multiply(high - low, to, to_stride, packed + low * row, start, own, ahead, LINE // blocks)
                    if wide < WIDE:
                        _move(result + offset, edge, high - low, wide, out)
                    if bias:
                        _add(result + offset, bias + 4 * panel * WIDE, high - low, wide, out, 0)
                    if residual:
                        _add(result + offset, residual + offset, high - low, wide, out, out)

    return multiply_panels


@function
def _move(to: int, edge: int, rows: int, wide: int, out: int) -> None:
    """Copies the outputs of the last panel that there are."""
    source, target = floats(edge, (rows, WIDE)), floats(to, (rows * out,))
    for row in range(rows):
        for i in range(wide):
            target[row * out + i] = source[row, i]


@function
def _add(to: int, summand: int, rows: int, wide: int, out: int, stride: int) -> None:
    """Adds rows ``stride`` apart to a tile of the result."""
    for row in range(rows):
        target, source = floats(to + 4 * row * out, (WIDE,)), floats(summand + 4 * row * stride, (WIDE,))
        if wide == WIDE:
            for i in range(WIDE):
                target[i] += source[i]
        else:
            for i in range(wide):
                target[i] += source[i]
