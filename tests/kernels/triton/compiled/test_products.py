"""Products with quantized weights, compiled for Hopper at the shapes of an 8B model.

Nothing is spilled, the right matrix units are used, weights are loaded asynchronously, and enough programs fit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.triton.grouped import grouped
from kernels.triton.invariant import product
from kernels.triton.quantize import quantize_vectors
from kernels.triton.scaled import scaled
from kernels.triton.sliced import sliced
from kernels.triton.weight_only import BYTES, NF4, weight_only
from tests.kernels.triton.hopper import SHARED_MEMORY, compiling
from tests.long import mostly_long, mostly_long_grid

IN, OUT, GROUPS = 4096, 14336, 32
F16, F32, I32, U8, BF16 = torch.float16, torch.float32, torch.int32, torch.uint8, torch.bfloat16
FP8 = torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def int4(rows: int) -> None:
    int4_product(empty(rows, IN))


def int4_product(x: Tensor, *, fixed: bool = False) -> None:
    scales, zeros = empty(GROUPS, OUT, dtype=F16), empty(GROUPS, OUT, dtype=U8)
    packed = empty(IN // 128, OUT, 32, dtype=torch.int16)
    sliced(x, packed, scales, zeros, None, group=IN // GROUPS, is_batch_invariant=fixed)


def byte(rows: int, *, stored: torch.dtype = torch.int8, groups: int = 1, zeroed: bool = False) -> None:
    zeros = empty(groups, OUT, dtype=F32) if zeroed else None
    weight, scales = empty(OUT, IN, dtype=stored), empty(groups, OUT, dtype=F32)
    weight_only(empty(rows, IN), weight, scales, None, BYTES, zeros=zeros)


def nf4(rows: int) -> None:
    scales, codes = empty(IN // 64, OUT, dtype=F32), empty(16, dtype=F32)
    weight_only(empty(rows, IN), empty(OUT, IN // 2, dtype=U8), scales, None, NF4, codes=codes)


def eight(rows: int, stored: torch.dtype, *, blocks: bool = False) -> None:
    row_scales = empty(rows, IN // 128, dtype=F32) if blocks else empty(rows, dtype=F32)
    scales = empty(OUT // 128, IN // 128, dtype=F32) if blocks else empty(OUT, dtype=F32)
    scaled(empty(rows, IN, dtype=stored), row_scales, empty(OUT, IN, dtype=stored), scales, None, BF16)


CASES: list[tuple[str, Callable[[], object], str, int, float]] = [
    ("int4, 16 rows", lambda: int4(16), "HMMA", 120, 0.25),
    ("int4, 64 rows", lambda: int4(64), "HGMMA", 168, 0.12),
    ("int8 weights, 16 rows", lambda: byte(16), "HGMMA", 112, 0.25),
    ("int8 weights and zeros, 16 rows", lambda: byte(16, groups=GROUPS, zeroed=True), "HGMMA", 128, 0.25),
    ("float8 weights, 16 rows", lambda: byte(16, stored=FP8), "HGMMA", 112, 0.25),
    ("nf4, 16 rows", lambda: nf4(16), "HGMMA", 96, 0.25),
    ("int8, 16 rows", lambda: eight(16, torch.int8), "IGMMA", 64, 0.25),
    ("float8, 16 rows", lambda: eight(16, FP8), "QGMMA", 64, 0.25),
    ("float8 in blocks, 16 rows", lambda: eight(16, FP8, blocks=True), "QGMMA", 64, 0.25),
    ("float8 in blocks, 256 rows", lambda: eight(256, FP8, blocks=True), "QGMMA", 208, 0.12),
]


@pytest.mark.parametrize(
    ("launch", "unit", "registers", "occupancy"),
    mostly_long([pytest.param(*case[1:], id=case[0]) for case in CASES], every=4),
)
def test_compiled_kernels_meet_their_limits(
    launch: Callable[[], object], unit: str, registers: int, occupancy: float
) -> None:
    with compiling() as made:
        launch()
    kernel = made[0]
    assert kernel.spills == kernel.stack == 0, kernel
    assert kernel.shared <= SHARED_MEMORY, kernel
    assert kernel.registers <= registers, kernel
    assert kernel.occupancy >= occupancy, kernel
    assert kernel.count(unit) > 0, kernel
    assert kernel.count("LDGSTS", ".128") > 0, kernel


def test_products_of_experts_use_the_matrix_units() -> None:
    """At the shapes of gpt-oss-20b."""
    count, into, out = 32, 2880, 5760
    packed, scales = empty(count, out, into // 2, dtype=U8), empty(count, into // 32, out)
    with compiling() as made:
        for rows in (64, 4096):
            ends = empty(count, dtype=I32)
            grouped(empty(rows, into), packed, scales, empty(16, dtype=F32), empty(count, out), ends)
    for kernel in made:
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.shared <= SHARED_MEMORY, kernel
        assert kernel.registers <= 128, kernel
        assert kernel.occupancy >= 0.25, kernel
        assert kernel.count("HGMMA") > 0, kernel
        assert kernel.count("LDGSTS") > 0, kernel


@pytest.mark.parametrize("rows", [1, 16])
def test_weights_of_4_bits_are_unpacked_where_they_are_multiplied(rows: int) -> None:
    """No instruction stores them for another thread, and the kernel that adds the parts spills nothing either."""
    with compiling() as made:
        int4(rows)
    product, total = made
    for kernel in made:
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.count("LDG", ".128") + kernel.count("LDGSTS", ".128") > 0, kernel
    assert product.registers <= 128, product
    # A thread multiplies 128 weights in a step. Two neighbours take a shift, in three of four slices, one logical
    # instruction and a subtraction.
    assert product.count("LOP3") < 1.0 * 128, product
    assert product.count("SHF") < 0.6 * 128, product
    assert product.instructions.total() < 7.5 * 128, product
    assert product.count("HMMA") > 0, product
    assert total.occupancy >= 0.75, total


@pytest.mark.parametrize(("launch", "capability"), mostly_long_grid([int4, nf4, byte], [90, 100], every=5))
def test_a_weight_is_dequantized_once_for_many_rows_with_wide_stores(
    launch: Callable[[int], object], capability: int
) -> None:
    with compiling(capability) as made:
        launch(128)
    [kernel] = made  # the product itself is the library's
    assert kernel.kernel == ("_dequantize_slices" if launch is int4 else "_dequantize")
    assert kernel.spills == kernel.stack == 0, kernel
    assert kernel.count("STG", ".128") > 0, kernel
    assert kernel.occupancy >= 0.5, kernel


@pytest.mark.long  # it compiles sixteen products
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_an_invariant_product_has_one_code_for_all_numbers_of_rows(dtype: torch.dtype) -> None:
    """Otherwise a row alone, or one of 16, would be computed by other instructions."""
    with compiling() as made:
        for rows in (1, 16, 17, 256):
            product(empty(rows, IN, dtype=dtype), empty(OUT, IN, dtype=dtype), None, F32)
            int4_product(empty(rows, IN), fixed=True)
    for name in ("_product", "_sliced"):
        kernels = [kernel for kernel in made if kernel.kernel == name]
        assert len(kernels) == 4
        assert len({str(sorted(kernel.instructions.items())) for kernel in kernels}) == 1
        assert kernels[0].spills == kernels[0].stack == 0, kernels[0]
        assert kernels[0].shared <= SHARED_MEMORY, kernels[0]


def test_rows_are_quantized_with_wide_loads() -> None:
    with compiling() as made:
        quantize_vectors(empty(16, 4096), torch.int8, 127.0)
        quantize_vectors(empty(16, 32, 128), FP8, 448.0)
    for kernel in made:
        assert kernel.spills == kernel.stack == 0, kernel
        assert kernel.count("LDG", ".128") > 0, kernel
        assert kernel.occupancy >= 0.75, kernel
