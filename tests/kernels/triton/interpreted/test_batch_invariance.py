"""Batch-invariant kernels: a row alone is, bit for bit, the row in any batch.

Rows are computed in random batches and orders; on a GPU another number of rows would also mean another compiled kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.linear import nf4
from kernels.quantize import quantize_vectors
from kernels.triton import grouped, invariant, scaled, sliced, weight_only
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.interpreted.test_products import (
    activations,
    checkpoint,
    close,
    experts,
    generator,
    int4_product,
)
from tests.kernels.triton.planted import planted
from tests.long import mostly_long, mostly_long_grid
from tests.seeds import shift

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS, INTO, OUT = 67, 512, 72
Product = Callable[[Tensor], Tensor]


def batches(size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of rows: each row of a few alone, then random ones of several sizes."""
    rng = random.Random(shift(seed))
    yield from ([row] for row in rng.sample(range(size), 3))
    for count in (2, 16, 17, size - 1):
        yield rng.sample(range(size), count)


def differing_batches(product: Product, x: Tensor) -> list[int]:
    """Return the sizes of batches in which a row is not what it is among all rows."""
    whole = product(x)
    return [len(rows) for rows in batches(len(x), 1) if not torch.equal(product(x[rows]), whole[rows])]


def plain(dtype: torch.dtype, module: object = invariant) -> Product:
    weight, bias = torch.randn(2, OUT, INTO, generator=generator(0)).to(dtype).to(DEVICE)
    return lambda x: module.product(x.to(DEVICE), weight, bias[:, 0], dtype).cpu()  # type: ignore[attr-defined]


def four(layout: str, module: ModuleType = sliced) -> Product:
    weight = checkpoint(layout, INTO, OUT, 16).weight  # eight blocks, so that there can be several parts
    return lambda x: int4_product(x, weight, None, module, is_batch_invariant=True).cpu()


def byte(stored: torch.dtype) -> Product:
    weight, _ = quantize_vectors(torch.randn(OUT, INTO, generator=generator(0)), stored)
    weight, scales = weight.to(DEVICE), torch.rand(4, OUT, generator=generator(1)).to(DEVICE)
    return lambda x: weight_only.weight_only(
        x.to(DEVICE), weight, scales, None, weight_only.BYTES, is_batch_invariant=True
    ).cpu()


def quantiles() -> Product:
    packed = torch.randint(0, 256, (OUT, INTO // 2), generator=generator(0)).byte().to(DEVICE)
    scales, codes = torch.rand(8, OUT, generator=generator(1)).to(DEVICE), torch.tensor(nf4.CODES, device=DEVICE)
    return lambda x: weight_only.weight_only(
        x.to(DEVICE), packed, scales, None, weight_only.NF4, codes=codes, is_batch_invariant=True
    ).cpu()


def eight(stored: torch.dtype, *, blocks: bool = False) -> Product:
    weight, _ = quantize_vectors(torch.randn(OUT, INTO, generator=generator(0)), stored)
    scales = torch.rand(1 if blocks else OUT, INTO // 128 if blocks else 1, generator=generator(1)).to(DEVICE)
    weight, scales = weight.to(DEVICE), scales if blocks else scales[:, 0]

    def multiply(x: Tensor) -> Tensor:
        numbers, row_scales = quantize_vectors(x.view(len(x), INTO // 128, 128) if blocks else x, stored)
        given = numbers.flatten(1).to(DEVICE), row_scales.to(DEVICE)
        return scaled.scaled(*given, weight, scales, None, torch.float32, is_batch_invariant=True).cpu()

    return multiply


def chosen_experts() -> Product:
    """Return the product of rows with the 4-bit weights of experts; a row's first number chooses its own."""
    weight, bias, _, _ = experts([0] * 5, INTO, OUT, 32)
    codes = torch.tensor(weight.levels, device=DEVICE)

    def multiply(x: Tensor) -> Tensor:
        owner = x[:, 0].abs().mul(7).long() % 5
        order = owner.argsort(stable=True)
        ends = torch.bincount(owner, minlength=5).cumsum(0).int()
        given = [part.to(DEVICE) for part in (x[order], weight.packed, weight.scales)]
        out = grouped.grouped(*given, codes, bias.to(DEVICE), ends.to(DEVICE), is_batch_invariant=True).cpu()
        return torch.empty_like(out).index_copy_(0, order, out)

    return multiply


PRODUCTS: dict[str, Callable[[], Product]] = {
    **{str(dtype): lambda dtype=dtype: plain(dtype) for dtype in (torch.float32, torch.bfloat16)},  # type: ignore[misc]
    "int4": lambda: four("in order"),
    "int4, act-order": lambda: four("act-order"),
    "int8 weights": lambda: byte(torch.int8),
    "float8 weights": lambda: byte(torch.float8_e4m3fn),
    "NF4": quantiles,
    "4-bit experts": chosen_experts,
    "W8A8": lambda: eight(torch.int8),
    "float8": lambda: eight(torch.float8_e4m3fn),
    "float8 by block": lambda: eight(torch.float8_e4m3fn, blocks=True),
}


@pytest.mark.parametrize("name", mostly_long(PRODUCTS, every=3))
def test_a_row_of_a_product_is_the_same_in_every_batch(name: str) -> None:
    x = activations(ROWS, INTO, torch.bfloat16 if "bfloat16" in name else torch.float32)
    assert differing_batches(PRODUCTS[name](), x) == []


@pytest.mark.parametrize(
    ("dtype", "rows", "into", "out"),
    mostly_long_grid(DTYPES, (1, 70), (96, 520), (70, 200), every=5),
    ids=str,
)
def test_invariant_products_equal_float64(dtype: torch.dtype, rows: int, into: int, out: int) -> None:
    """Covers rows, inputs and outputs that are not multiples of a tile, one part and several."""
    x, weight = activations(rows, into, dtype), torch.randn(out, into, generator=generator(1)).to(dtype)
    bias = torch.randn(out, generator=generator(2)).to(dtype)
    expected = x.double() @ weight.double().T
    ours = invariant.product(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), dtype)
    close(ours, expected + bias.double(), dtype)
    close(invariant.product(x.to(DEVICE), weight.to(DEVICE), None, torch.float32), expected, torch.float32)


@pytest.mark.parametrize(("dtype", "into", "out"), mostly_long_grid(DTYPES, (20, 130), (16, 72), every=5), ids=str)
def test_products_of_each_head_equal_float64_in_every_batch(dtype: torch.dtype, into: int, out: int) -> None:
    heads = 3
    x = activations(ROWS, heads * (into + 4), dtype).view(ROWS, heads, -1)[:, :, 4:]
    weight = torch.randn(heads, into, out, generator=generator(1)).to(dtype)

    def product(rows: Tensor) -> Tensor:
        return invariant.head_products(rows.to(DEVICE), weight.to(DEVICE)).transpose(0, 1).cpu()

    close(product(x).flatten(1), torch.einsum("thi,hio->tho", x.double(), weight.double()).flatten(1), dtype)
    assert differing_batches(product, x) == []


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(
    ("module", "right", "wrong"),
    [
        ("invariant", "count_parts(x, columns, steps", "count_parts(x, columns * rows, steps"),
        ("sliced", "grid[0] * (1 if is_batch_invariant else grid[1])", "grid[0] * rows"),
    ],
)
def test_parts_and_kernels_that_depend_on_the_rows_are_detected(
    module: str, right: str, wrong: str, tmp_path: Path
) -> None:
    bad = planted(module, right, wrong, module, tmp_path)
    product = plain(torch.float32, bad) if module == "invariant" else four("in order", bad)
    assert differing_batches(product, activations(ROWS, INTO)) != []
