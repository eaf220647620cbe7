"""Blocks in the order in which the products read them, and rows of weights read back from there.

A panel has ``WIDE`` outputs, and begins with a number for each, float32, if the format has them. For each of its blocks
it holds the scales ``[WIDE]`` and, if there are any, the minimums ``[WIDE]``, as in the file; the factors
``[groups][factors][WIDE]``, int8; and for each group its planes of codes. A plane of b bits is ``[b][WIDE][4]`` bytes,
of which byte ``[load, output, i]`` holds the bits of the columns ``4 * quad + i``, for the 8 / b quads from
``load * 8 / b`` on, the first in its lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.cpu.linear.gemm_tile import WIDE
from kernels.cpu.linear.ggml.formats import GROUP, BlockFormat
from kernels.cpu.runtime.kernel import (
    Body,
    as_float,
    float32_array,
    function,
    int64_array,
    named_function,
    split_range,
    uint8_array,
)
from kernels.cpu.simd.convert_4bit import load_float16

QUADS = GROUP // 4
"""Groups of four columns, which one instruction multiplies."""
SCRATCH_BYTES = 512
"""Memory for the codes and factors of one block."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sizes in bytes of the parts of a block of a panel."""

    header: int
    """Numbers of the outputs, ahead of a panel's blocks."""
    factors_at: int
    planes_at: int
    group: int
    """Planes of a group."""
    block: int


def layout_of(block_format: BlockFormat) -> BlockLayout:
    """Return where the parts of a block are."""
    header = 4 * WIDE if block_format.has_row_scales else 0
    factors_at = block_format.scale_bytes * WIDE * (1 if block_format.minimum_at is None else 2)
    planes_at = factors_at + block_format.groups * block_format.factors * WIDE
    group = block_format.bits * WIDE * GROUP // 8
    return BlockLayout(header, factors_at, planes_at, group, planes_at + block_format.groups * group)


def shifts_of(planes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the position of each plane's lowest bit in a code."""
    return tuple(sum(planes[:index]) for index in range(len(planes)))


def create_packer(block_format: BlockFormat) -> Body:
    """Return a body that arranges blocks. Arguments ``(rows, panels, scratch, out, blocks of a row, row scales)``.

    ``rows``: the addresses of the rows, int64 ``[out]``. ``scratch``: ``[threads][SCRATCH_BYTES]``. ``row scales``:
    float32 ``[out]``, of a format that has them. The lanes behind the last output are left as they are.
    """
    layout, unpack, size = layout_of(block_format), block_format.unpack, block_format.size
    groups, num_factors, columns = block_format.groups, block_format.factors, block_format.columns
    planes, shifts = block_format.planes, shifts_of(block_format.planes)
    factors_at, planes_at, group_bytes, block_bytes = layout.factors_at, layout.planes_at, layout.group, layout.block
    scale_at, minimum_at = block_format.scale_at, -1 if block_format.minimum_at is None else block_format.minimum_at
    sign = 128 if block_format.subtracts_minimum else 0
    scale_bytes, header = block_format.scale_bytes, layout.header

    @named_function(f"pack_block_{block_format.name}")
    def pack_block(source: int, target: int, lane: int, scratch: int) -> None:
        block, to = uint8_array(source, (size,)), uint8_array(target, (block_bytes,))
        codes, factors = uint8_array(scratch, (columns,)), uint8_array(scratch + columns, (columns,))
        unpack(block, codes, factors)
        for i in range(scale_bytes):
            to[scale_bytes * lane + i] = block[scale_at + i]
            if minimum_at >= 0:
                to[scale_bytes * (WIDE + lane) + i] = block[minimum_at + i] ^ (sign if i else 0)
        for index in range(groups * num_factors):
            to[factors_at + index * WIDE + lane] = factors[index]
        quads = codes.view(np.uint32)
        for group in range(groups):
            words = to[planes_at + group * group_bytes :][:group_bytes].view(np.uint32)
            at = lane
            for plane in range(len(planes)):
                bits, shift = planes[plane], shifts[plane]
                mask, num_quads = np.uint32(0x01010101 * ((1 << bits) - 1)), 8 // bits
                for load in range(bits):
                    word = np.uint32(0)
                    for i in range(num_quads):
                        code = quads[group * QUADS + load * num_quads + i]
                        word |= ((code >> np.uint32(shift)) & mask) << np.uint32(bits * i)
                    words[at] = word
                    at += WIDE

    @named_function(f"pack_{block_format.name}")
    def pack(a: Any, thread: int, threads: int) -> None:
        panels, scratch, out, row_blocks = a[1], a[2] + SCRATCH_BYTES * thread, a[3], a[4]
        rows = int64_array(a[0], (out,))
        panel_bytes = header + row_blocks * block_bytes
        first, last = split_range((out + WIDE - 1) // WIDE, thread, threads)
        for panel in range(first, last):
            for lane in range(min(WIDE, out - panel * WIDE)):
                source = rows[panel * WIDE + lane]
                target = panels + panel * panel_bytes + header
                if header:
                    scales = float32_array(a[5], (out,))
                    float32_array(target - header, (WIDE,))[lane] = scales[panel * WIDE + lane]
                for index in range(row_blocks):
                    pack_block(source + index * size, target + index * block_bytes, lane, scratch)

    return pack


def create_reader(block_format: BlockFormat) -> Body:
    """Return a body that writes rows of the weight, in float32 and multiplied by a number.

    Arguments ``(panels, indices, result, rows, blocks of a row, factor, indices' stride)``.
    """
    layout, read_scales = layout_of(block_format), _create_scale_reader(block_format)
    groups, num_scales = block_format.groups, block_format.num_scales
    planes, shifts = block_format.planes, shifts_of(block_format.planes)
    planes_at, group_bytes, block_bytes, header = layout.planes_at, layout.group, layout.block, layout.header
    has_table, zero, table = block_format.table is not None, block_format.zero, block_format.table or (0,)

    @named_function(f"read_group_{block_format.name}")
    def read_group(start: int, group: int, lane: int, result: Any) -> None:
        block = uint8_array(start, (block_bytes,))
        for part in range(num_scales):
            scale, minimum = read_scales(start, group, part, lane)
            width = GROUP // num_scales
            for column in range(part * width, (part + 1) * width):
                at = planes_at + group * group_bytes
                code = 0
                for plane in range(len(planes)):
                    bits = planes[plane]
                    load, index = divmod(column // 4, 8 // bits)
                    byte = int(block[at + (load * WIDE + lane) * 4 + column % 4])
                    code |= ((byte >> (bits * index)) & ((1 << bits) - 1)) << shifts[plane]
                    at += 4 * bits * WIDE
                level = table[code] if has_table else code - zero
                result[column] = scale * np.float32(level) + minimum

    @named_function(f"read_{block_format.name}")
    def read(a: Any, thread: int, threads: int) -> None:
        panels, rows, row_blocks, factor = a[0], a[3], a[4], np.float32(as_float(a[5]))
        index_stride, width = a[6], row_blocks * groups * GROUP
        indices = int64_array(a[1], ((rows - 1) * index_stride + 1,))
        first, last = split_range(rows, thread, threads)
        for row in range(first, last):
            panel, lane = divmod(indices[row * index_stride], WIDE)
            result = float32_array(a[2] + 4 * row * width, (width,))
            start = panels + panel * (header + row_blocks * block_bytes)
            for index in range(row_blocks):
                block = start + header + index * block_bytes
                for group in range(groups):
                    read_group(block, group, lane, result[(index * groups + group) * GROUP :])
            if header:
                row_scale = float32_array(start, (WIDE,))[lane]
                for column in range(width):
                    result[column] *= row_scale
            for column in range(width):
                result[column] *= factor

    return read


def _create_scale_reader(block_format: BlockFormat) -> Any:
    """Return a function ``(block, group, part, lane)`` that returns the scale and the minimum of a group."""
    layout, num_scales, num_factors = layout_of(block_format), block_format.num_scales, block_format.factors
    factors_at, has_minimum, has_nibbles = (
        layout.factors_at,
        block_format.minimum_at is not None,
        block_format.has_nibble_factors,
    )
    is_power, are_factors_scales = block_format.scale_type == "e8m0", block_format.scale_type == "e4m3"
    block_bytes = layout.block

    @named_function(f"read_scales_{block_format.name}")
    def read_scales(start: int, group: int, part: int, lane: int) -> Any:
        block, minimum = uint8_array(start, (block_bytes,)), np.float32(0)
        at = factors_at + group * num_factors * WIDE + lane
        if is_power:
            return _halve_power(block[lane]), minimum
        if are_factors_scales:
            return _halve_float8(block[at + part * WIDE]), minimum
        scale = load_float16(start + 2 * lane)
        if has_minimum:
            minimum = load_float16(start + 2 * (WIDE + lane))
        if num_factors:
            factor = np.int32(np.int8(block[at + part * WIDE]))
            if has_nibbles:
                minimum *= np.float32((factor >> 4) & 15)
                factor &= 15
            elif has_minimum:
                minimum *= np.float32(block[at + num_scales * WIDE])
            scale *= np.float32(factor)
        return scale, minimum

    return read_scales


@function
def _halve_power(exponent: int) -> Any:
    """Return half of the power of two with an exponent of 8 bits (E8M0)."""
    bits = np.uint32(exponent - 1) << np.uint32(23) if exponent > 1 else np.uint32(0x00200000) << np.uint32(exponent)
    return np.uint32(bits).view(np.float32)


@function
def _halve_float8(code: int) -> Any:
    """Return half of a positive number of 8 bits (E4M3)."""
    exponent, mantissa = code >> 3, code & 7
    number = mantissa + 8 if exponent else mantissa
    bits = np.uint32(max(exponent, 1) + 127 - 11) << np.uint32(23)
    return np.float32(number) * np.uint32(bits).view(np.float32)
