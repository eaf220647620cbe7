"""Instructions of products of rows, rounded to 8 bits by groups of 32 columns, with panels of blocks.

``x = code * unit`` with a unit for each group of a row. Within a group the products of codes that share a scale are
summed to an exact integer. A result is a chain of fused multiply-adds of these integers and of the minimums times the
sums of the codes of ``x``, in the order of the groups, whatever the number of rows or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from kernels.cpu.availability import HAS_INT8_DOT, HAS_SIGNED_DOT, LANES
from kernels.cpu.linear.gemm_tile import (
    CACHE_LINE,
    VECTORS,
    WIDE,
    add_shorts,
    dot,
    dot_shorts,
    dot_signed,
    fence,
    keep_order,
    write_tile,
)
from kernels.cpu.linear.ggml.formats import GROUP, BlockFormat
from kernels.cpu.linear.ggml.panels import QUADS, BlockLayout, layout_of, shifts_of
from kernels.cpu.linear.rounding import LEVELS, STEP
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
        self._prefetch(prefetched, prefetch_stride)
        codes = builder.add(x, I64(4 * (1 + num_scales) * rows))
        values: list[Any] = [None] * len(totals)
        for part in range(num_scales):
            sums_of_x = builder.add(x, I64(4 * (1 + part) * rows))
            sums = self._sum_products(part, rows, codes, planes, None if minimums else sums_of_x)
            for row in range(rows):
                row_sum = self._load_splat(sums_of_x, 4 * row, FLOAT) if minimums else None
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
            unit = self._load_splat(x, 4 * row, FLOAT)
            for v in range(VECTORS):
                at = row * VECTORS + v
                results.append(fused_multiply_add(builder, values[at], unit, totals[at]))
        return results

    def _sum_products(self, part: int, rows: int, codes: Any, planes: Any, zeros: Any) -> list[Any]:
        """Generate the integer sums ``[rows, VECTORS]`` of the columns that share a scale.

        ``zeros``: the address of what is added for the zero that is subtracted from each code; ``None`` for nothing.
        """
        builder, multiply = self._builder, _choose_products(self._format)
        sums = [_WORDS(None)] * (rows * VECTORS)
        if zeros is not None and multiply is not _SignedProducts:
            sums = [self._load_splat(zeros, 4 * row, I32) for row in range(rows) for _ in range(VECTORS)]
        quads = QUADS // self._format.num_scales
        products = [multiply(builder, total, self._format) for total in sums]
        keeps_order = rows > 1 and multiply is not _Dots and not HAS_SIGNED_DOT
        # Between the columns of a sum of two, sums of 16 and of 32 bits would be held, too many for the registers.
        together = 2 if _count_short_sums(self._format.largest) == 2 else 1
        for quad in range(part * quads, (part + 1) * quads):
            if keeps_order and quad % quads and quad % together == 0:
                planes, held = keep_order(builder, planes, [each.held for each in products])
                for each, value in zip(products, held, strict=True):
                    each.hold(value)
            weights = [self._read_codes(planes, quad, v) for v in range(VECTORS)]
            for row in range(rows):
                offset = 4 * quad % STEP + STEP * (row + rows * (4 * quad // STEP))
                value = self._load_splat(codes, offset, I32)
                for v in range(VECTORS):
                    products[row * VECTORS + v].add(weights[v], value)
        return [each.finish() for each in products]

    def _prefetch(self, prefetched: Any, prefetch_stride: Any) -> None:
        """Prefetch as many bytes as the planes of a group have."""
        for _ in range(0, self._layout.group, CACHE_LINE):
            prefetch_line(self._builder, prefetched, level=2)
            prefetched = self._builder.add(prefetched, prefetch_stride)

    def _read_codes(self, planes: Any, quad: int, v: int) -> Any:
        """Return the codes of four columns of each output. ``planes``: their address."""
        builder, result, offset = self._builder, None, 4 * v * LANES
        for bits, shift in zip(self._format.planes, shifts_of(self._format.planes), strict=True):
            load, index = divmod(quad, 8 // bits)
            value = builder.load(pointer_at(builder, planes, offset + 4 * WIDE * load, _WORDS), align=4)
            offset += 4 * WIDE * bits
            distance = shift - bits * index
            if distance:
                move = builder.shl if distance > 0 else builder.lshr
                value = move(value, constant(abs(distance), _WORDS))
            if bits < 8:
                value = builder.and_(value, constant(0x01010101 * (((1 << bits) - 1) << shift), _WORDS))
            result = value if result is None else builder.or_(result, value)
        return result if self._format.table is None else self._look_up(result, self._format.table)

    def _look_up(self, codes: Any, table: Sequence[int]) -> Any:
        """Return the levels of codes, with the zero added."""
        builder, bytes_type = self._builder, ir.VectorType(_I8, 4 * LANES)
        levels = ir.Constant(bytes_type, [level + self._format.zero for level in table] * (LANES // 4))
        name = "llvm.x86.avx512.pshuf.b.512" if LANES == 16 else "llvm.x86.avx2.pshuf.b"
        if HAS_SIGNED_DOT:
            name = "llvm.aarch64.neon.tbl1.v16i8"
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

    def _load_splat(self, start: Any, offset: int, kind: Any) -> Any:
        """Return a number in all lanes."""
        value = self._builder.load(pointer_at(self._builder, start, offset, kind), align=4)
        return splat_value(self._builder, value, ir.VectorType(kind, LANES))


class _Dots:
    """Sums of products of bytes, four of which one instruction adds to 32 bits."""

    def __init__(self, builder: Any, initial: Any, block_format: BlockFormat) -> None:
        self._builder, self._largest = builder, block_format.largest
        self.held = initial
        """The sums, or what has to be added to them."""

    def add(self, weights: Any, x: Any) -> None:
        """Generate the sum with four products: of unsigned weights and signed ``x``."""
        self.held = dot(self._builder, self.held, weights, x, self._largest.bit_length())

    def hold(self, value: Any) -> None:
        """Go on with a copy of what is held."""
        self.held = value

    def finish(self) -> Any:
        """Return the sums in 32 bits."""
        return self.held


class _ShortProducts(_Dots):
    """Sums of products of bytes that are added in 16 bits as long as they fit, without VNNI."""

    def __init__(self, builder: Any, initial: Any, block_format: BlockFormat) -> None:
        super().__init__(builder, initial, block_format)
        self._sums, self._count = initial, 0

    def add(self, weights: Any, x: Any) -> None:
        """Generate the sum with four products: of unsigned weights and signed ``x``."""
        shorts = dot_shorts(self._builder, weights, x)
        self.held = self._builder.add(self.held, shorts) if self._count else shorts
        self._count += 1
        if self._count == _count_short_sums(self._largest):
            self._sums, self._count = self.finish(), 0
            self.held = self._sums

    def hold(self, value: Any) -> None:
        """Go on with a copy of what is held."""
        self.held = value
        if self._count == 0:
            self._sums = value

    def finish(self) -> Any:
        """Return the sums in 32 bits."""
        if self._count == 0:
            return self.held
        return self._builder.add(self._sums, add_shorts(self._builder, self.held))


class _SignedProducts(_Dots):
    """Sums of products of signed bytes, without VNNI: ARM has them, on AVX2 the sign of the weights moves to ``x``.

    Two products of 7 bits and a sign fit in 16 bits, which those of an unsigned byte do not.
    """

    def add(self, weights: Any, x: Any) -> None:
        """Generate the sum with four products: of weights with 128 added and signed ``x``, no byte of which is -128."""
        builder, quads = self._builder, ir.VectorType(_I8, 4 * LANES)
        signed = builder.bitcast(builder.xor(weights, constant(-0x7F7F7F80, _WORDS)), quads)
        if HAS_SIGNED_DOT:
            self.held = dot_signed(builder, self.held, x, signed)
            return
        sizes = call_intrinsic(builder, f"llvm.abs.v{4 * LANES}i8", quads, signed, ir.Constant(ir.IntType(1), 0))
        value = call_intrinsic(builder, "llvm.x86.avx2.psign.b", quads, builder.bitcast(x, quads), signed)
        self.held = builder.add(self.held, add_shorts(builder, dot_shorts(builder, sizes, value)))


def _choose_products(block_format: BlockFormat) -> type[_Dots]:
    """Return the instructions that this processor has for a format."""
    if HAS_INT8_DOT:
        return _Dots
    if HAS_SIGNED_DOT:
        return _SignedProducts if block_format.zero == 128 else _Dots
    if _count_short_sums(block_format.largest):
        return _ShortProducts
    return _SignedProducts if LANES == 8 and block_format.zero == 128 else _Dots


def _count_short_sums(largest: int) -> int:
    """Return how many sums of two products with an unsigned byte can be added in 16 bits."""
    return 32767 // (2 * largest * LEVELS)
