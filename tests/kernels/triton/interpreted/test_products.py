"""Products with quantized weights compared with float64, for 1, 5 and 16 rows, at the edges of groups and of tiles.

The weights are packed here, number by number, as the formats are described; the expected products are computed from the
numbers before packing.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from kernels.linear import fp8, nf4, weight_only_int4, weight_only_int8
from kernels.quantize import quantize_vectors
from kernels.triton import grouped, scaled, sliced, weight_only
from tests.closeness import EPS, assert_rounded, unit_bound
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.planted import planted
from tests.long import mostly_long, mostly_long_grid
from tests.seeds import shift

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(shift(seed))


def pack_slices(numbers: list[list[int]], size: int) -> Tensor:
    """Pack the numbers of inputs ``[in][out]`` into blocks of four slices, one by one."""
    into, out = len(numbers), len(numbers[0])
    blocks = []
    for first in range(0, into, 4 * size):
        inputs = [[first + part * size + index for part in range(4)] for index in range(size)]
        whole = [
            [sum(numbers[k][c] << 4 * part for part, k in enumerate(four) if k < into) for four in inputs]
            for c in range(out)
        ]
        blocks.append([[word - (1 << 16) if word >= 1 << 15 else word for word in row] for row in whole])
    return torch.tensor(blocks, dtype=torch.int16)


class Checkpoint(NamedTuple):
    """A 4-bit weight as it is stored, and in float64."""

    weight: weight_only_int4.Int4
    wide: Tensor
    """The weight in float64, ``[out, in]``."""


def checkpoint(layout: str, into: int, out: int, group: int) -> Checkpoint:
    """Create a checkpoint, "in order" or in "act-order". Codes and zeros include their extremes."""
    rng, groups = generator(into + out), into // group
    numbers = torch.randint(0, 16, (into, out), generator=rng)
    zeros = torch.randint(1, 16, (groups, out), generator=rng)
    zeros[:, 0], zeros[:, 1] = 16, 1
    scales = (torch.rand(groups, out, generator=rng) + 0.1).to(torch.float16) / 8
    group_of = torch.arange(into) // group
    order = torch.randperm(into, generator=rng).to(torch.int32) if layout == "act-order" else None
    wide = ((numbers - zeros[group_of]) * scales[group_of].double()).T
    if order is not None:
        wide = torch.empty_like(wide).index_copy_(1, order.long(), wide)
    packed = pack_slices(numbers.tolist(), 32 if group % 32 == 0 else 16)
    return Checkpoint(weight_only_int4.Int4(packed, scales, zeros.to(torch.uint8), order, group), wide)


def activations(rows: int, into: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, into, generator=generator(rows)).to(dtype)


def close(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Check the result up to rounding relative to the largest number, since sums cancel."""
    assert ours.dtype == dtype
    size = float(expected.abs().max())
    assert_rounded(ours.cpu(), expected, size * unit_bound(dtype))


def int4_product(
    x: Tensor,
    weight: weight_only_int4.Int4,
    bias: Tensor | None,
    module: ModuleType = sliced,
    dtype: torch.dtype | None = None,
    *,
    is_batch_invariant: bool = False,
) -> Tensor:
    packed, scales, zeros, order = (None if part is None else part.to(DEVICE) for part in weight[:4])
    bias = None if bias is None else bias.to(DEVICE)
    result: Tensor = module.sliced(
        x.to(DEVICE),
        packed,
        scales,
        zeros,
        bias,
        order=order,
        group=weight.group,
        dtype=dtype,
        is_batch_invariant=is_batch_invariant,
    )
    return result


LAYOUTS = ["in order", "act-order"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rows", "into", "out", "group"), [(1, 192, 72, 64), (5, 192, 136, 32), (16, 96, 64, 96), (3, 80, 70, 16)]
)
def test_int4_products_equal_float64(layout: str, rows: int, into: int, out: int, group: int) -> None:
    """Covers outputs that are not multiples of a tile, groups of a slice, of a block and of all inputs, the last block
    not full, and split-K."""
    weight, wide = checkpoint(layout, into, out, group)
    assert torch.equal(weight_only_int4.dequantize(weight).double(), wide)
    x, bias = activations(rows, into), torch.randn(out, generator=generator(1))
    expected = x.double() @ wide.T + bias
    close(int4_product(x, weight, bias), expected, torch.float32)
    close(weight_only_int4.int4_linear(x, weight, bias), expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 70])
def test_int4_products_of_16_bits_are_rounded_once(layout: str, rows: int, dtype: torch.dtype) -> None:
    weight, wide = checkpoint(layout, 128, 72, 128)
    x = activations(rows, 128, dtype)
    close(int4_product(x, weight, None), x.double() @ wide.T, dtype)


MANY = 130
"""Rows for which a weight is dequantized once."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("into", "out", "group"), [(192, 72, 64), (128, 136, 32), (256, 64, 128)])
def test_int4_products_of_many_rows_equal_float64(
    layout: str, into: int, out: int, group: int, dtype: torch.dtype
) -> None:
    weight, wide = checkpoint(layout, into, out, group)
    x, bias = activations(MANY, into, dtype), torch.randn(out, generator=generator(1)).to(dtype)
    close(int4_product(x, weight, bias), x.double() @ wide.T + bias.double(), dtype)


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(
    ("layout", "right", "wrong"),
    [
        ("in order", "about = (first // group) * out + n", "about = n"),
        ("in order", "zero + 8388608", "zero + 8388609"),
        ("act-order", "x.index_select(1, order)", "x"),
        ("in order", "into + first + k[None, :]", "into + k[None, :]"),
    ],
)
def test_planted_bugs_of_dequantization_are_detected(layout: str, right: str, wrong: str, tmp_path: Path) -> None:
    weight, wide = checkpoint(layout, 256, 72, 64)
    x = activations(MANY, 256)
    ours = int4_product(x, weight, None, planted("sliced", right, wrong, "sliced", tmp_path))
    expected = x.double() @ wide.T
    assert not torch.allclose(ours.double(), expected, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 5])
def test_products_of_a_head_are_not_rounded_to_16_bits(layout: str, rows: int) -> None:
    weight, wide = checkpoint(layout, 128, 72, 64)
    x = activations(rows, 128, torch.bfloat16)
    ours = int4_product(x, weight, None, dtype=torch.float32)
    close(ours, x.double() @ wide.T, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "groups"), [(1, 3), (5, 1), (16, 6), (MANY, 3)])
def test_int8_weights_equal_float64(rows: int, groups: int, dtype: torch.dtype) -> None:
    into, out = 192, 70
    weight = torch.randint(-127, 128, (out, into), generator=generator(0), dtype=torch.int8)
    scales = torch.rand(groups, out, generator=generator(1)) + 0.1
    x = activations(rows, into, dtype)
    expected = x.double() @ (weight.double() * scales.double().T.repeat_interleave(into // groups, 1)).T
    ours = weight_only.weight_only(x.to(DEVICE), weight.to(DEVICE), scales.to(DEVICE), None, weight_only.BYTES)
    close(ours, expected, dtype)
    if dtype == torch.float32:
        close(weight_only_int8.int8_weight_linear(x, weight, scales), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", [5, MANY])
def test_int8_weights_with_zeros_and_order_equal_float64(stored: torch.dtype, dtype: torch.dtype, rows: int) -> None:
    """Zeros are far from the weights, with differences that 16 bits cannot hold."""
    into, out, groups = 192, 70, 3
    weight = torch.randint(-128, 128, (out, into), generator=generator(0)).to(stored)
    scales, zeros = torch.rand(2, groups, out, generator=generator(1)) + 0.1
    zeros = (zeros * 256 - 140).round()
    order = torch.randperm(into, generator=generator(2)).int()
    x, size = activations(rows, into, dtype), into // groups
    wide = (weight.double() - zeros.double().T.repeat_interleave(size, 1)) * scales.double().T.repeat_interleave(
        size, 1
    )
    expected = x.double()[:, order] @ wide.T
    given = [one.to(DEVICE) for one in (x, weight, scales)]
    changed = {"zeros": zeros.to(DEVICE), "order": order.to(DEVICE)}
    close(weight_only.weight_only(*given, None, weight_only.BYTES, **changed), expected, dtype)
    if dtype == torch.float32:
        close(weight_only_int8.int8_weight_linear(x, weight, scales, zeros=zeros, order=order), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "group"), [(1, 64), (5, 32), (16, 192), (MANY, 64)])
def test_nf4_products_equal_float64(rows: int, group: int, dtype: torch.dtype) -> None:
    into, out = 192, 70
    codes = torch.randint(0, 16, (out * into,), generator=generator(0))
    absmax = torch.rand(out * into // group, generator=generator(1)) + 0.1
    packed = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)
    weight = nf4.from_bitsandbytes(packed[:, None], absmax, out, into)
    wide = (torch.tensor(nf4.CODES, dtype=torch.float64)[codes].view(-1, group) * absmax.double()[:, None]).view(
        out, into
    )
    x = activations(rows, into, dtype)
    ours = weight_only.weight_only(
        x.to(DEVICE), weight.packed.to(DEVICE), weight.scales.to(DEVICE), None, weight_only.NF4,
        codes=torch.tensor(nf4.CODES, device=DEVICE),
    )  # fmt: skip
    close(ours, x.double() @ wide.T, dtype)
    if dtype == torch.float32:
        close(nf4.nf4_linear(x, weight), x.double() @ wide.T, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "group"), [(1, 32), (5, 16), (MANY, 16)])
def test_products_with_4_bit_floats_equal_float64(rows: int, group: int, dtype: torch.dtype) -> None:
    """MXFP4 has powers of two for groups of 32, NVFP4 other scales for groups of 16."""
    into, out, numbers = 96, 70, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.randint(0, 16, (out, into), generator=generator(0))
    scales = torch.rand(into // group, out, generator=generator(1)) + 0.1
    if group == 32:
        scales = (2.0 ** torch.randint(-4, 2, scales.shape, generator=generator(1))).bfloat16()
    weight = nf4.Nf4((codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), scales, nf4.FLOATS_OF_4_BITS)
    levels = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.float64)
    wide = levels[codes] * scales.T.double().repeat_interleave(group, dim=1)
    x = activations(rows, into, dtype)
    ours = weight_only.weight_only(
        x.to(DEVICE), weight.packed.to(DEVICE), weight.scales.to(DEVICE), None, weight_only.NF4,
        codes=torch.tensor(weight.levels, device=DEVICE),
    )  # fmt: skip
    close(ours, x.double() @ wide.T, dtype)
    if dtype == torch.float32:
        close(nf4.nf4_linear(x, weight), x.double() @ wide.T, dtype)


def experts(counts: list[int], into: int, out: int, group: int) -> tuple[nf4.Nf4, Tensor, Tensor, Tensor]:
    """Return the 4-bit weights of all experts, their biases, their exact weights, and the ends of their rows."""
    codes = torch.randint(0, 16, (len(counts), out, into), generator=generator(0))
    scales = torch.rand(len(counts), into // group, out, generator=generator(1)) + 0.1
    weight = nf4.Nf4((codes[:, :, ::2] * 16 + codes[:, :, 1::2]).to(torch.uint8), scales, nf4.FLOATS_OF_4_BITS)
    levels = torch.tensor(nf4.FLOATS_OF_4_BITS, dtype=torch.float64)
    wide = levels[codes] * scales.transpose(1, 2).double().repeat_interleave(group, dim=2)
    bias = torch.randn(len(counts), out, generator=generator(2))
    return weight, bias, wide, torch.tensor(counts).cumsum(0).int()


def grouped_error(module: ModuleType, counts: list[int], group: int, dtype: torch.dtype, *, has_bias: bool) -> bool:
    """Return True if a grouped product is not that of float64."""
    weight, bias, wide, ends = experts(counts, 96, 70, group)
    x, bias = activations(sum(counts), 96, dtype), bias.to(dtype)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expected = torch.einsum("ri,roi->ro", x.double(), wide[owner])
    expected = expected + bias.double()[owner] if has_bias else expected
    codes = torch.tensor(weight.levels, device=DEVICE)
    given = [part.to(DEVICE) for part in (x, weight.packed, weight.scales)]
    try:
        ours = module.grouped(*given, codes, bias.to(DEVICE) if has_bias else None, ends.to(DEVICE))
        close(ours, expected, dtype)
        if dtype == torch.float32:
            close(nf4.grouped_nf4_linear(x, weight, bias if has_bias else None, ends), expected, dtype)
    except (AssertionError, InterpreterError):
        return True
    return False


COUNTS = [[3, 0, 20, 1], [0, 0, 1], [70, 5, 0, 130], [16, 32]]
"""Rows of each expert: none, few, and more than a tile."""


@pytest.mark.parametrize(("counts", "dtype", "group"), mostly_long_grid(COUNTS, DTYPES, [32, 16], every=5), ids=str)
def test_grouped_products_with_4_bit_floats_equal_float64(counts: list[int], dtype: torch.dtype, group: int) -> None:
    assert not grouped_error(grouped, counts, group, dtype, has_bias=group == 32)


GROUPED_BUGS = {
    "the next expert computes a full tile": ("(last <= tile)", "(last < tile)"),
    "tiles begin at the first row": ("own_tile * M", "0 * own_tile"),
    "rows of the next expert are written": (
        "is_row, is_output = m < tl.sum(tl.where(is_own, ends, 0), axis=0)",
        "is_row, is_output = m < m + 1",
    ),
    "all experts have the first weight": ("W += expert.to(tl.int64)", "W += 0 * expert.to(tl.int64)"),
    "all experts have the first scales": ("SCALES += expert.to(tl.int64)", "SCALES += 0 * expert.to(tl.int64)"),
    "all experts have the first bias": ("BIAS + expert.to(tl.int64) * out", "BIAS"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="some of them read what is not theirs")
@pytest.mark.parametrize("name", mostly_long(GROUPED_BUGS, every=3))
def test_planted_bugs_of_grouped_products_are_detected(name: str, tmp_path: Path) -> None:
    bad = planted("grouped", *GROUPED_BUGS[name], "grouped", tmp_path)
    assert grouped_error(bad, [17, 3, 4], 32, torch.float32, has_bias=True)


def test_nf4_codes_are_quantiles_of_the_normal_distribution() -> None:
    """The paper's construction: eight quantiles upwards from 0, nine downwards, trimmed alike, then scaled."""
    offset = 0.5 * ((1 - 1 / (2 * 15)) + (1 - 1 / (2 * 16)))
    normal = torch.distributions.Normal(0.0, 1.0)
    up = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    down = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    expected = torch.cat((up, torch.zeros(1), down)).sort().values
    # The paper's table was computed in float32.
    torch.testing.assert_close(torch.tensor(nf4.CODES).double(), expected / expected.max(), atol=8 * EPS, rtol=0)


class Eight(NamedTuple):
    """An 8-bit product, its scales, and its value in float64."""

    x: Tensor
    row_scales: Tensor
    weight: Tensor
    scales: Tensor
    expected: Tensor


def eight(stored: torch.dtype, blocks: bool, rows: int, into: int, out: int) -> Eight:
    x = torch.randn(rows, into // 128 if blocks else 1, 128 if blocks else into, generator=generator(rows))
    # The largest products are below 65,504, the largest number of float16.
    numbers, row_scales = quantize_vectors(x * torch.logspace(-2, 1, rows)[:, None, None], stored)
    weight, _ = quantize_vectors(torch.randn(out, into, generator=generator(1)), stored)
    scales = torch.rand(-(-out // 128) if blocks else out, into // 128 if blocks else 1, generator=generator(2)) + 0.1
    spread = scales.double().repeat_interleave(128 if blocks else 1, 0)[:out]
    wide = weight.double() * spread.repeat_interleave(128 if blocks else into, 1)
    expected = (numbers.double() * row_scales.double()[..., None]).flatten(1) @ wide.T
    if not blocks:
        row_scales, scales = row_scales.squeeze(1), scales.squeeze(1)
    return Eight(numbers.flatten(1), row_scales, weight, scales, expected)


def eight_product(case: Eight, dtype: torch.dtype, bias: Tensor | None = None, module: ModuleType = scaled) -> Tensor:
    bias = None if bias is None else bias.to(DEVICE)
    result: Tensor = module.scaled(*(y.to(DEVICE) for y in case[:4]), bias, dtype)
    return result


EIGHTS = [(torch.int8, False), (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True)]


@pytest.mark.parametrize(("stored", "blocks"), EIGHTS)
@pytest.mark.parametrize(("rows", "into", "out"), [(1, 256, 70), (5, 384, 200), (16, 128, 64), (70, 128, 130)])
def test_products_of_8_bits_equal_float64(stored: torch.dtype, blocks: bool, rows: int, into: int, out: int) -> None:
    """On a GPU float8 sums have fewer bits."""
    case, bias = eight(stored, blocks, rows, into, out), torch.randn(out, generator=generator(3))
    dtype = torch.float32 if DEVICE == "cpu" or stored == torch.int8 else torch.float16
    close(eight_product(case, dtype, bias), case.expected + bias, dtype)
    close(eight_product(case, torch.bfloat16), case.expected, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 70])
def test_the_librarys_product_of_float8_takes_the_same_scales(rows: int) -> None:
    case, bias = eight(torch.float8_e4m3fn, False, rows, 128, 64), torch.randn(64, generator=generator(3)).bfloat16()
    given = (part.to(DEVICE) for part in case[:4])
    close(fp8.multiply_by_library(*given, bias.to(DEVICE)), case.expected + bias.double(), torch.bfloat16)


def test_the_librarys_product_serves_many_rows_of_bfloat16_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(70, 128), torch.zeros(64, 128).to(torch.float8_e4m3fn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert fp8._has_library_product(x, weight, torch.bfloat16)
    assert not fp8._has_library_product(x[:64], weight, torch.bfloat16)
    assert not fp8._has_library_product(x, weight, torch.float32)
    assert not fp8._has_library_product(x, weight[:60], torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert not fp8._has_library_product(x, weight, torch.bfloat16)


def test_reference_products_round_rows_and_equal_float64() -> None:
    x = torch.randn(5, 256, generator=generator(0)) * torch.logspace(-2, 2, 5)[:, None]
    for stored in (torch.int8, torch.float8_e4m3fn):
        weight, _ = quantize_vectors(torch.randn(200, 256, generator=generator(1)), stored)
        numbers, row_scales = quantize_vectors(x, stored)
        plain = (numbers.double() * row_scales.double()[:, None]) @ weight.double().T
        scales = torch.rand(200, generator=generator(2))
        product = weight_only_int8.int8_linear if stored == torch.int8 else fp8.fp8_linear
        close(product(x, weight, scales), plain * scales.double(), torch.float32)
    numbers, row_scales = quantize_vectors(x.view(5, 2, 128), stored)
    given = (numbers.double() * row_scales.double()[..., None]).flatten(1)
    blocks = torch.rand(2, 2, generator=generator(3))
    wide = weight.double() * blocks.double().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    close(fp8.fp8_linear(x, weight, blocks), given @ wide.T, torch.float32)
    close(
        fp8.fp8_linear(x, weight, torch.tensor(0.5)),
        fp8.fp8_linear(x, weight, torch.full((200, 1), 0.5)).double(),
        torch.float32,
    )


def test_shapes_that_disagree_are_refused_with_their_numbers() -> None:
    with pytest.raises(ValueError, match="100 bytes and 4 scales"):
        nf4.from_bitsandbytes(torch.zeros(100, dtype=torch.uint8), torch.zeros(4), 4, 64)
    weight = torch.zeros(70, 96, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"\(70, 96\) with scales \(5, 70\)"):
        weight_only_int8.int8_weight_linear(torch.zeros(1, 96), weight, torch.zeros(5, 70))
    with pytest.raises(ValueError, match=r"zeros \(1, 70\) for scales \(3, 70\)"):
        weight_only_int8.int8_weight_linear(torch.zeros(1, 96), weight, torch.zeros(3, 70), zeros=torch.zeros(1, 70))
    with pytest.raises(ValueError, match=r"\(70, 96\) with scales \(69,\)"):
        weight_only_int8.int8_linear(torch.zeros(1, 96), weight, torch.zeros(69))
    with pytest.raises(ValueError, match=r"\(70, 96\) with scales \(1, 2\)"):
        fp8.fp8_linear(torch.zeros(1, 96), weight.to(torch.float8_e4m3fn), torch.zeros(1, 2))


@pytest.mark.long
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("layout", "right", "wrong"),
    [
        ("in order", "zero + 128", "zero + 129"),
        ("in order", "zero + 8388608", "zero + 8388609"),
        ("in order", "(4 * SLICE)", "(4 * (SLICE ^ 1))"),
        ("in order", "(4 * block + part_of_block) * K", "(4 * block + (part_of_block ^ 1)) * K"),
        ("in order", "block * out + n.to(tl.int64)", "n.to(tl.int64)"),
        ("in order", "(first // group) * out + n", "n"),
        ("in order", "(first // group) * out + n", "(first // group) + n"),
        ("act-order", "ORDER + column", "ORDER + k"),
        ("in order", "part * steps, tl.min", "part * steps + part, tl.min"),
    ],
)
def test_planted_bugs_are_detected(layout: str, right: str, wrong: str, rows: int, tmp_path: Path) -> None:
    """Plants a zero that is off by one; slices, blocks, groups, scales or activations in a wrong order; a lost step."""
    weight, wide = checkpoint(layout, 512, 72, 64)
    dtype = torch.bfloat16 if "128" in right or "129" in wrong else torch.float32
    x = activations(rows, 512, dtype)
    ours = int4_product(x, weight, None, planted("sliced", right, wrong, "sliced", tmp_path))
    expected = x.double() @ wide.T
    # A bug changes a large part of the result, not its last bits.
    assert not torch.allclose(ours.double(), expected, atol=0.02 * float(expected.abs().max()))


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize(
    ("blocks", "right", "wrong"),
    [
        (False, "ROW_SCALES + m,", "ROW_SCALES + m * 0,"),
        (False, "SCALES + n,", "SCALES + n * 0,"),
        (True, "m * (into // 128) + step", "m * (into // 128)"),
        (True, "(into // 128) + step)", "(into // 128))"),
        (True, "(tl.program_id(0) * N // 128)", "tl.program_id(0) * 0"),
    ],
)
def test_planted_scales_of_other_rows_are_detected(blocks: bool, right: str, wrong: str, tmp_path: Path) -> None:
    case = eight(torch.float8_e4m3fn, blocks, 5, 384, 200)
    ours = eight_product(case, torch.float32, None, planted("scaled", right, wrong, "scaled", tmp_path))
    assert not torch.allclose(ours.double(), case.expected, rtol=0.02)
