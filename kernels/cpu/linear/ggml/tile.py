"""Instructions of products of rows, rounded to 8 bits by groups of 32 columns, with panels of blocks.

``x = code * unit`` with a unit for each group of a row. Within a group the products of codes that share a scale are
summed to an exact integer. A result is a chain of fused multiply-adds of these integers and of the minimums times the
sums of the codes of ``x``, in the order of the groups, whatever the number of rows or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kernels.cpu.availability import LANES
from kernels.cpu.linear.gemm_tile import CACHE_LINE, VECTORS, WIDE, dot, fence, write_tile
from kernels.cpu.linear.ggml.formats import GROUP, TABLE_ZERO, BlockFormat
from kernels.cpu.linear.ggml.panels import QUADS, BlockLayout, layout_of, shifts_of
from kernels.cpu.linear.rounding import STEP
from kernels.cpu.simd.llvm_ir import (
    FLOAT,
    I32,
    I64,
    call_intrinsic,
    constant,
    fused_multiply_add,
    generate_loop,
    pointer_at,
    prefetch_line,
    splat_value,
)

_I8, _I16, _HALF = ir.IntType(8), ir.IntType(16), ir.HalfType()
_WORDS, _SHORTS = ir.VectorType(I32, LANES), ir.VectorType(_I16, LANES)
_VECTOR = ir.VectorType(FLOAT, LANES)


def group_of_x(num_scales: int) -> int:
    """Return the bytes of a row's group: its unit, the sum of its codes for each scale, and its codes."""
    return 4 + 4 * num_scales + GROUP


class BlockTile:
    """Generates the product of a block of rows and a panel; called as ``product_body`` wants it."""

    def __init__(self, block_format: BlockFormat) -> None:
        self._format, self._layout = block_format, layout_of(block_format)

    def __call__(self, builder: Any, rows: int, target: Any, x: Any, panel: Any, blocks: Any, prefetching: Any) -> None:
        """``blocks``: the number of blocks of a row."""
        layout, groups = self._layout, self._format.groups
        ahead, prefetch_stride = prefetching
        block_lines = layout.block // CACHE_LINE

        def add_block(_index: Any, values: Any) -> Any:
            from_x, from_panel, prefetched, *totals = values
            group = _Group(builder, self._format, layout, from_panel)

            def add_group(index: Any, values: Any) -> Any:
                from_x, prefetched, *totals = values
                totals = group.add(totals, from_x, index, prefetched, prefetch_stride)
                following = builder.add(from_x, I64(rows * group_of_x(self._format.num_scales)))
                lines = I64(layout.group // CACHE_LINE)
                return [following, builder.add(prefetched, builder.mul(prefetch_stride, lines)), *totals]

            from_x, _, *totals = generate_loop(builder, I64(groups), [from_x, prefetched, *totals], add_group)
            following = builder.add(prefetched, builder.mul(prefetch_stride, I64(block_lines)))
            return [from_x, builder.add(from_panel, I64(layout.block)), following, *totals]

        zeros = [_VECTOR(None)] * (rows * VECTORS)
        start = builder.add(panel, I64(layout.header))
        totals = generate_loop(builder, blocks, [x, start, ahead, *zeros], add_block)[3:]
        if self._format.has_row_scales:
            pointers = [pointer_at(builder, panel, 4 * v * LANES, _VECTOR) for v in range(VECTORS)]
            scales = [builder.load(pointer, align=4) for pointer in pointers]
            totals = [
                fence(builder, builder.fmul(total, scales[index % VECTORS])) for index, total in enumerate(totals)
            ]
        write_tile(builder, totals, target)


class _Group:
    """Products of one group of a block."""

    def __init__(self, builder: Any, block_format: BlockFormat, layout: BlockLayout, block: Any) -> None:
        """``block``: its address in the panel."""
        self._builder, self._format, self._layout, self._block = builder, block_format, layout, block
        self._scales = [] if block_format.scale_type == "e4m3" else self._load_scales()
        self._minimums = [] if block_format.minimum_at is None else self._load_halves(2 * WIDE)

    def add(self, totals: Any, x: Any, index: Any, prefetched: Any, prefetch_stride: Any) -> list[Any]:
        """Generate the sums of ``totals`` ``[rows, VECTORS]`` and the products of the group with that index."""
        builder, num_scales = self._builder, self._format.num_scales
        rows = len(totals) // VECTORS
        scales, minimums = self._load_factors(index)
        planes = builder.add(self._block, I64(self._layout.planes_at))
        planes = builder.add(planes, builder.mul(index, I64(self._layout.group)))
        loaded = self._load_planes(planes, prefetched, prefetch_stride)
        codes = builder.add(x, I64(4 * (1 + num_scales) * rows))
        values: list[Any] = [None] * len(totals)
        for part in range(num_scales):
            sums_of_x = [self._load_of_row(x, 4 * ((1 + part) * rows + row), I32) for row in range(rows)]
            sums = self._sum_products(part, codes, loaded, sums_of_x)
            for row, sum_of_x in enumerate(sums_of_x):
                row_sum = splat_value(builder, builder.sitofp(sum_of_x, FLOAT), _VECTOR) if minimums else None
                for v in range(VECTORS):
                    at = row * VECTORS + v
                    product = builder.sitofp(sums[at], _VECTOR)
                    if part == 0:
                        values[at] = fence(builder, builder.fmul(product, scales[part][v]))
                    else:
                        values[at] = fused_multiply_add(builder, product, scales[part][v], values[at])
                    if minimums:
                        values[at] = fused_multiply_add(builder, row_sum, minimums[part][v], values[at])
        results = []
        for row in range(rows):
            unit = splat_value(builder, self._load_of_row(x, 4 * row, FLOAT), _VECTOR)
            for v in range(VECTORS):
                at = row * VECTORS + v
                results.append(fused_multiply_add(builder, values[at], unit, totals[at]))
        return results

    def _sum_products(self, part: int, codes: Any, loaded: Any, sums_of_x: Any) -> list[Any]:
        """Generate the integer sums ``[rows, VECTORS]`` of the columns that share a scale."""
        builder, rows = self._builder, len(sums_of_x)
        sums: list[Any] = []
        for sum_of_x in sums_of_x:
            # The zero is subtracted from each code.
            initial = splat_value(builder, builder.mul(sum_of_x, I32(-self._format.zero)), _WORDS)
            sums += [initial] * VECTORS
        quads = QUADS // self._format.num_scales
        bits = self._format.bits if self._format.table is None else 8
        for quad in range(part * quads, (part + 1) * quads):
            weights = [self._codes_of(loaded, quad, v) for v in range(VECTORS)]
            for row in range(rows):
                offset = 4 * quad % STEP + STEP * (row + rows * (4 * quad // STEP))
                value = splat_value(builder, self._load_of_row(codes, offset, I32), _WORDS)
                for v in range(VECTORS):
                    at = row * VECTORS + v
                    sums[at] = dot(self._builder, sums[at], weights[v], value, bits)
        return sums

    def _load_planes(self, start: Any, prefetched: Any, prefetch_stride: Any) -> list[list[list[Any]]]:
        """Return the loaded vectors ``[plane][load][VECTORS]``, and prefetch as many bytes."""
        builder, offset, loaded = self._builder, 0, []
        for bits in self._format.planes:
            loads = []
            for _ in range(bits):
                pointers = [pointer_at(builder, start, offset + 4 * v * LANES, _WORDS) for v in range(VECTORS)]
                loads.append([builder.load(pointer, align=4) for pointer in pointers])
                offset += 4 * WIDE
            loaded.append(loads)
        for _ in range(0, self._layout.group, CACHE_LINE):
            prefetch_line(builder, prefetched, level=2)
            prefetched = builder.add(prefetched, prefetch_stride)
        return loaded

    def _codes_of(self, loaded: Any, quad: int, v: int) -> Any:
        """Return the codes of four columns of each output."""
        builder, result = self._builder, None
        for bits, shift, loads in zip(self._format.planes, shifts_of(self._format.planes), loaded, strict=True):
            load, index = divmod(quad, 8 // bits)
            value = loads[load][v]
            distance = shift - bits * index
            if distance:
                move = builder.shl if distance > 0 else builder.lshr
                value = move(value, constant(abs(distance), _WORDS))
            if bits < 8:
                value = builder.and_(value, constant(0x01010101 * (((1 << bits) - 1) << shift), _WORDS))
            result = value if result is None else builder.or_(result, value)
        return result if self._format.table is None else self._look_up(result, self._format.table)

    def _look_up(self, codes: Any, table: Sequence[int]) -> Any:
        """Return the levels of codes, with ``TABLE_ZERO`` added."""
        builder, bytes_type = self._builder, ir.VectorType(_I8, 4 * LANES)
        levels = ir.Constant(bytes_type, [level + TABLE_ZERO for level in table] * (LANES // 4))
        name = "llvm.x86.avx512.pshuf.b.512" if LANES == 16 else "llvm.x86.avx2.pshuf.b"
        looked_up = call_intrinsic(builder, name, bytes_type, levels, builder.bitcast(codes, bytes_type))
        return builder.bitcast(looked_up, _WORDS)

    def _load_factors(self, index: Any) -> tuple[list[list[Any]], list[list[Any]]]:
        """Return the scales and minimums of the group's parts, ``[parts][VECTORS]`` each."""
        builder, block_format = self._builder, self._format
        minimums = [self._minimums] if self._minimums else []
        if not block_format.factors:
            return [self._scales], minimums
        start = builder.add(self._block, I64(self._layout.factors_at))
        start = builder.add(start, builder.mul(index, I64(block_format.factors * WIDE)))
        codes = [self._load_bytes(start, number * WIDE) for number in range(block_format.factors)]
        if block_format.scale_type == "e4m3":
            return [[self._halve_float8(code) for code in part] for part in codes], minimums
        factors = [[builder.sext(code, _WORDS) for code in part] for part in codes]
        of_scales, of_minimums = factors[: block_format.num_scales], factors[block_format.num_scales :]
        if block_format.has_nibble_factors:
            low, four = constant(15, _WORDS), constant(4, _WORDS)
            of_minimums = [[builder.and_(builder.lshr(factor, four), low) for factor in part] for part in of_scales]
            of_scales = [[builder.and_(factor, low) for factor in part] for part in of_scales]
        return (
            [self._multiply_factors(self._scales, part) for part in of_scales],
            [self._multiply_factors(self._minimums, part) for part in of_minimums],
        )

    def _multiply_factors(self, floats: Any, factors: Any) -> list[Any]:
        """Return exact products."""
        builder = self._builder
        return [
            fence(builder, builder.fmul(value, builder.sitofp(factor, _VECTOR)))
            for value, factor in zip(floats, factors, strict=True)
        ]

    def _load_scales(self) -> list[Any]:
        """Return the scales of all outputs in float32."""
        if self._format.scale_type == "float16":
            return self._load_halves(0)
        return [self._halve_power(exponents) for exponents in self._load_bytes(self._block, 0)]

    def _halve_power(self, exponents: Any) -> Any:
        """Return half of the powers of two with exponents of 8 bits (E8M0)."""
        builder = self._builder
        words = builder.zext(exponents, _WORDS)
        normal = builder.shl(builder.sub(words, constant(1, _WORDS)), constant(23, _WORDS))
        low = builder.shl(constant(0x00200000, _WORDS), builder.and_(words, constant(1, _WORDS)))
        is_low = builder.icmp_unsigned("<", words, constant(2, _WORDS))
        return builder.bitcast(builder.select(is_low, low, normal), _VECTOR)

    def _halve_float8(self, codes: Any) -> Any:
        """Return half of positive numbers of 8 bits (E4M3): as float16 their bits are 2**8 times too small a number."""
        builder = self._builder
        halves = builder.shl(builder.zext(codes, _SHORTS), constant(7, _SHORTS))
        numbers = builder.fpext(builder.bitcast(halves, ir.VectorType(_HALF, LANES)), _VECTOR)
        return fence(builder, builder.fmul(numbers, constant(2.0**7, _VECTOR)))

    def _load_bytes(self, start: Any, offset: int) -> list[Any]:
        """Return a byte of each output."""
        builder, kind = self._builder, ir.VectorType(_I8, LANES)
        pointers = (pointer_at(builder, start, offset + v * LANES, kind) for v in range(VECTORS))
        return [builder.load(pointer, align=4) for pointer in pointers]

    def _load_halves(self, offset: int) -> list[Any]:
        """Return the float16 numbers of all outputs in float32."""
        builder, kind = self._builder, ir.VectorType(_HALF, LANES)
        pointers = (pointer_at(builder, self._block, offset + 2 * v * LANES, kind) for v in range(VECTORS))
        return [builder.fpext(builder.load(pointer, align=2), _VECTOR) for pointer in pointers]

    def _load_of_row(self, start: Any, offset: int, kind: Any) -> Any:
        return self._builder.load(pointer_at(self._builder, start, offset, kind), align=4)
