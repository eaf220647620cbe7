"""Weights in the block formats of GGUF files."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from kernels.cpu.availability import HAS_INT8_DOT, LANES
from kernels.cpu.linear.gemm_tile import WIDE
from kernels.cpu.linear.ggml.formats import FORMATS, GROUP, BlockFormat
from kernels.cpu.linear.ggml.panels import SCRATCH_BYTES, create_packer, create_reader, layout_of
from kernels.cpu.linear.ggml.tile import BlockTile, group_of_x
from kernels.cpu.linear.packed_weights import PackedWeights, product_body
from kernels.cpu.linear.rounding import LEVELS, PREFETCH_PER_STEP, STEP, codes_writer, largest
from kernels.cpu.runtime.kernel import Kernel, create_kernel, float32_array, is_in_compile_cache, named_function
from kernels.cpu.runtime.memory import allocate_resident
from kernels.cpu.runtime.recorder import empty

_MIN_PARALLEL = 1 << 20
"""With fewer products one thread is done before a second one has started."""
_TALL = 2 if LANES == 8 and HAS_INT8_DOT else 4
"""Rows of a tile: their integer sums, their results and the scales share the registers. Sums of 16 bits leave time to
keep the results in memory. On ARM four rows take the fewest instructions per row.
"""
_write_codes = codes_writer(0)


class PackedBlocks(PackedWeights):
    """A weight ``[out, in]`` in a block format."""

    def __init__(self, name: str, row_bytes: int, rows: Tensor, row_scales: Tensor | None = None) -> None:
        """``rows``: the addresses of the rows in memory, int64 ``[out]``; each is blocks in the format of that name.

        ``row_scales``: numbers by which the rows are multiplied, float32 ``[out]``, of a format that has them; ``None``
        for 1.
        """
        block_format = FORMATS[name]
        out, row_blocks = len(rows), row_bytes // block_format.size
        columns, panels = row_blocks * block_format.columns, -(-out // WIDE)
        layout = layout_of(block_format)
        words = allocate_resident(panels * (layout.header + row_blocks * layout.block) // 4).view(panels, -1)
        scales = torch.ones(out) if row_scales is None else row_scales.contiguous()
        scratch = torch.empty(torch.get_num_threads(), SCRATCH_BYTES, dtype=torch.uint8)
        _get_packer(name)(rows, words, scratch, out, row_blocks, scales)
        self._name, self._row_blocks = name, row_blocks
        row = columns // GROUP * group_of_x(block_format.num_scales)
        shape = torch.Size((out, columns))
        super().__init__(product_kernel(name), name, shape, words, row_blocks, row=row, min_parallel=_MIN_PARALLEL)

    def read_rows(self, indices: Tensor, factor: float = 1.0) -> Tensor:
        """Return the rows with these indices, int64 of any stride, times a number: float32 ``[rows, in]``."""
        rows = len(indices)
        result = empty(rows, self._in)
        if rows == 0:
            return result
        threads = 1 if rows * self._in < _MIN_PARALLEL >> 4 else None
        arguments = self._panels, indices, result, rows, self._row_blocks, float(factor), indices.stride(0)
        _get_reader(self._name)(*arguments, threads=threads)
        return result


def needs_compiling(name: str) -> bool:
    """Return True if the kernels of a format are not in the compile cache yet."""
    return not is_in_compile_cache(f"multiply_{name}")


@cache
def _get_packer(name: str) -> Kernel:
    return create_kernel(f"pack_{name}", create_packer(FORMATS[name]))


@cache
def _get_reader(name: str) -> Kernel:
    return create_kernel(f"read_{name}", create_reader(FORMATS[name]))


@cache
def product_kernel(name: str) -> Kernel:
    """Return the kernel of the products with a format."""
    block_format = FORMATS[name]
    return create_kernel(
        f"multiply_{name}", product_body(name, _create_row_packer(block_format), BlockTile(block_format), _TALL)
    )


def _create_row_packer(block_format: BlockFormat) -> Any:
    """Return a function that writes for each group the units of the rows, the sums of their codes, and the codes.

    The sums are float32 for a format with minimums, otherwise int32 and times the zero, subtracted.
    """
    num_scales, zero, has_minimums = block_format.num_scales, block_format.zero, block_format.minimum_at is not None
    width, row_bytes = GROUP // num_scales, group_of_x(num_scales)

    @named_function(f"pack_rows_{block_format.name}")
    def pack(to: int, x: int, rows: int, into: int, stride: int, _own: int, ahead: int) -> None:
        for row in range(rows):
            source = x + 4 * row * stride
            for group in range(into // GROUP):
                start, part = to + group * rows * row_bytes, source + 4 * group * GROUP
                limit = largest(part, GROUP)
                row_values = float32_array(start, (1 + num_scales, rows))
                row_values[0, row] = limit / types.float32(LEVELS)
                factor = types.float32(LEVELS) / limit
                codes = start + 4 * rows * (1 + num_scales) + STEP * row
                prefetched = ahead + PREFETCH_PER_STEP * (into * row + group * GROUP) // STEP
                for index in range(num_scales):
                    total = _write_codes(
                        codes + index * rows * STEP, STEP * rows, part + 4 * width * index, width, factor, prefetched
                    )
                    if has_minimums:
                        row_values[1 + index, row] = np.float32(total)
                    else:
                        row_values[1 + index, row] = np.int32(-zero * total).view(np.float32)

    return pack
