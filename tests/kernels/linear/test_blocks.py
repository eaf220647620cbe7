"""Weights in the block formats of GGUF files, compared with ``gguf.quants`` and with sums in float64."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu import availability
from kernels.cpu.linear import gemm_tile
from kernels.cpu.linear.ggml.formats import FORMATS
from kernels.cpu.linear.ggml.packed import PackedBlocks
from kernels.linear import blocks
from kernels.linear.blocks import BlockLinear
from kernels.linear.embedding import BlockEmbedding
from tests.closeness import EPS, assert_rounded
from tests.kernels.linear.test_int4 import rounded
from tests.long import mostly_long
from tests.seeds import shift

pytestmark = pytest.mark.skipif(not blocks.is_supported(), reason="this processor lacks products of bytes")
KINDS = sorted(FORMATS)
SHAPES = [(1, 256), (33, 256), (70, 768), (64, 1536)]


def random_blocks(kind: str, out: int, into: int, *, powers: bool = False) -> Tensor:
    """Return random rows of blocks, uint8 ``[out, bytes]``. ``powers``: scales and minimums are powers of 2."""
    generator, block_format = np.random.default_rng(shift(out + into)), FORMATS[kind]
    shape = out, into // block_format.columns, block_format.size
    result = generator.integers(0, 256, shape, dtype=np.uint8)
    if block_format.scale_type == "e8m0":
        result[..., block_format.scale_at] = generator.integers(118, 122, shape[:2])
        return torch.from_numpy(result.reshape(out, -1))
    if block_format.scale_type == "e4m3":
        result[..., :4] = generator.integers(4, 7, (*shape[:2], 4)) * 8 if powers else result[..., :4] & 63
        return torch.from_numpy(result.reshape(out, -1))
    for start in (block_format.scale_at, block_format.minimum_at):
        if start is not None:
            numbers = 2.0 ** generator.integers(-3, 0, shape[:2]) if powers else generator.normal(0, 0.01, shape[:2])
            result[..., start : start + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return torch.from_numpy(result.reshape(out, -1))


def dequantize(kind: str, rows: Tensor) -> Tensor:
    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


def pack(kind: str, rows: Tensor) -> PackedBlocks:
    return PackedBlocks(kind, rows.shape[1], rows.data_ptr() + rows.stride(0) * torch.arange(len(rows)))


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=3))
@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_rows_read_back_equal_gguf_to_the_bit(kind: str, out: int, into: int) -> None:
    rows = random_blocks(kind, out, into)
    table, expected = BlockEmbedding(pack(kind, rows)), dequantize(kind, rows)
    assert torch.equal(table(torch.arange(out)), expected)
    indices = torch.randint(out, (3, 50))
    assert torch.equal(table(indices[:, 1], 3.0), expected[indices[:, 1]] * 3)


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
def test_every_scale_of_8_bits_is_read_exactly(kind: str) -> None:
    """Denormal numbers, those that are no numbers, and those that overflow, as the package gguf reads them."""
    rows, start = random_blocks(kind, 256, 256), FORMATS[kind].scale_at
    for byte, row in enumerate(rows.numpy()):
        scales = row.reshape(-1, FORMATS[kind].size)
        scales[:, start : start + (1 if kind == "MXFP4" else 4)] = byte
    with np.errstate(over="ignore"):
        expected = dequantize(kind, rows)
    assert torch.equal(pack(kind, rows).read_rows(torch.arange(256)), expected)
    numbers = expected.abs().amax(dim=1) < 2.0**116  # sums of codes are up to 127 * 12 times as large
    units = torch.eye(1, 256)  # products with one column are its weights
    found = pack(kind, rows).product(units, None, None)[0]
    torch.testing.assert_close(found[numbers], expected[numbers, 0], rtol=2 * EPS, atol=2.0**-126)


def test_results_of_a_row_are_multiplied_by_its_own_number() -> None:
    rows, x = random_blocks("NVFP4", 70, 256), torch.randn(5, 256)
    addresses = rows.data_ptr() + rows.stride(0) * torch.arange(70)
    scales = torch.rand(70) + 0.5
    scaled, plain = PackedBlocks("NVFP4", rows.shape[1], addresses, scales), pack("NVFP4", rows)
    residual = torch.randn(5, 70)
    assert torch.equal(scaled.product(x, None, None), plain.product(x, None, None) * scales)
    assert torch.equal(scaled.product(x, None, residual), plain.product(x, None, None) * scales + residual)
    everything = torch.arange(70)
    assert torch.equal(scaled.read_rows(everything), plain.read_rows(everything) * scales[:, None])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if FORMATS[kind].scale_type == "float16"])
def test_every_float16_scale_is_read_exactly(kind: str) -> None:
    """Denormal numbers, the largest one, and negative ones."""
    rows, start = random_blocks(kind, 6, 256), FORMATS[kind].scale_at
    for row, number in zip(rows.numpy(), (2.0**-24, 2.0**-15, 65504, -1.5, 0, -0.0), strict=True):
        row.reshape(-1, FORMATS[kind].size)[:, start : start + 2] = np.array([number], np.float16).view(np.uint8)
    assert torch.equal(pack(kind, rows).read_rows(torch.arange(6)), dequantize(kind, rows))


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=3))
@pytest.mark.parametrize(("out", "into"), SHAPES[:3])
def test_sums_within_groups_are_exact(kind: str, out: int, into: int) -> None:
    """Scales are powers of 2 and rounding leaves each group of x unchanged, so float32 holds every sum."""
    torch.manual_seed(shift(out))
    rows = random_blocks(kind, out, into, powers=True)
    linear, right = BlockLinear([pack(kind, rows)]), dequantize(kind, rows).double()
    for count in (*range(1, 20), 113):
        x = torch.randint(-7, 8, (count, into // 32, 32)).float()
        x[..., 3] = -127
        x[..., 4:] = 0
        x[:, 1:] = 0  # one group, so that no sum exceeds 24 bits
        x = (x * 2.0 ** torch.randint(-1, 2, (count, into // 32, 1))).view(count, into)
        assert torch.equal(linear(x).double(), x.double() @ right.T)


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=3))
@pytest.mark.parametrize(("out", "into"), SHAPES)
def test_products_equal_those_of_groups_rounded_to_127_levels(kind: str, out: int, into: int) -> None:
    torch.manual_seed(shift(out))
    rows, bias = random_blocks(kind, out, into), torch.randn(out)
    linear, right = BlockLinear([pack(kind, rows)], bias), dequantize(kind, rows).double()
    for count in (1, 7, 40):
        x, residual = torch.randn(count, into) * torch.logspace(-3, 3, count)[:, None], torch.randn(count, out)
        near = rounded(x, 32)
        # Codes and minimums have opposite signs: their terms are larger than the weights.
        terms = near.abs() @ _magnitudes(kind, rows).T + bias.abs() + residual.abs()
        assert_rounded(linear.add(x, residual), near @ right.T + bias + residual, (into // 16 + 6) * EPS * terms)


def _magnitudes(kind: str, rows: Tensor) -> Tensor:
    """Return for each weight the sum of the magnitudes of the terms that it is the difference of."""
    largest = dequantize(kind, rows).double().abs().view(len(rows), -1, 16).amax(-1)
    return (4 * largest).repeat_interleave(16, 1)


@pytest.mark.parametrize("kind", mostly_long(KINDS, every=3))
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_never_depends_on_the_other_rows_nor_on_threads(kind: str, threads: int) -> None:
    rows, before = random_blocks(kind, 1000, 1024), torch.get_num_threads()
    packed, x = pack(kind, rows), torch.randn(37, 1024)
    expected = torch.cat([packed.product(row[None], None, None) for row in x])
    torch.set_num_threads(threads)
    try:
        for start, end in ((0, 37), (3, 5), (10, 31)):
            assert torch.equal(packed.product(x[start:end], None, None), expected[start:end])
    finally:
        torch.set_num_threads(before)


def test_parts_of_several_formats_lie_side_by_side() -> None:
    kinds, into, x = ("Q4_K", "Q6_K", "Q8_0"), 256, torch.randn(9, 256)
    parts = [pack(kind, random_blocks(kind, 50 + number, into)) for number, kind in enumerate(kinds)]
    bias, residual = torch.randn(153), torch.randn(9, 153)
    whole = BlockLinear(parts, bias)
    assert whole.parameters == 153 * into + 153
    expected = torch.cat([part.product(x, None, None) for part in parts], 1)
    assert torch.equal(whole(x), expected + bias)
    assert torch.equal(whole.add(x, residual), expected + bias + residual)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_at_most_a_twentieth_more_than_the_file(kind: str) -> None:
    rows = random_blocks(kind, 64, 1024)
    packed = pack(kind, rows)
    assert packed.num_bytes <= 1.05 * rows.numel()


@pytest.mark.long  # each is compiled
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "NVFP4"])
def test_processors_without_sums_of_four_products_compute_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not availability.HAS_INT8_DOT:
        pytest.skip("this processor is one of them")
    rows, x = random_blocks(kind, 40, 512), torch.randn(5, 512)
    expected = pack(kind, rows).product(x, None, None)
    monkeypatch.setattr(gemm_tile, "HAS_INT8_DOT", False)
    monkeypatch.setattr("kernels.cpu.runtime.kernel._CACHE", None)
    from kernels.cpu.linear.ggml import packed

    packed.product_kernel.cache_clear()
    try:
        assert torch.equal(pack(kind, rows).product(x, None, None), expected)
    finally:
        packed.product_kernel.cache_clear()
