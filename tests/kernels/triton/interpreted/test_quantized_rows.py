"""Norms and activations that quantize their results: the bits of the separate kernels, at sizes no tile divides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.common.quantization import LIMITS, Quantization, QuantizedRows, Rows
from kernels.linear.fp8 import find_quantization, fp8_linear
from kernels.linear.weight_only_int8 import QUANTIZATION, int8_linear
from kernels.quantize import quantize_rows
from kernels.triton import activation, norm, quantize
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.planted import planted
from tests.long import mostly_long_grid
from tests.seeds import shift

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WAYS = [Quantization(dtype, block) for dtype in LIMITS for block in (None, 128)]
SIZES = [(1, 128), (5, 384), (17, 640), (3, 2176)]
ODD_SIZES = [(7, 1), (5, 48), (2, 1001)]
"""Only rows as a whole are quantized there."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return rows of different magnitudes; the first is zero."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(shift(seed)))
    return (x * torch.logspace(-2, 1, shape[0])[:, None] * (torch.arange(shape[0])[:, None] > 0)).to(dtype).to(DEVICE)


def quantize_apart(x: Rows, way: Quantization) -> QuantizedRows:
    """Quantize by the kernel that does nothing else."""
    assert isinstance(x, Tensor)
    vectors = x if way.block is None else x.reshape(len(x), -1, way.block)
    codes, scales = quantize.quantize_vectors(vectors, way.dtype, LIMITS[way.dtype])
    return QuantizedRows(codes.view(x.shape), scales, x.dtype)


def differ(ours: Rows, expected: QuantizedRows) -> bool:
    assert isinstance(ours, QuantizedRows)
    assert (ours.dtype, ours.codes.dtype, ours.scales.dtype) == (expected.dtype, expected.codes.dtype, torch.float32)
    same_codes = torch.equal(ours.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    return not (same_codes and torch.equal(ours.scales, expected.scales))


Fused = Callable[[tuple[int, int], torch.dtype, Quantization | None], tuple[Rows, ...]]


def norm_alone(shape: tuple[int, int], dtype: torch.dtype, way: Quantization | None) -> tuple[Rows, ...]:
    return (norm.rms_norm(random(*shape, dtype=dtype), random(2, shape[1], seed=1)[1], 1e-5, way),)


def norm_of_sum(shape: tuple[int, int], dtype: torch.dtype, way: Quantization | None) -> tuple[Rows, ...]:
    x, residual = (random(*shape, dtype=dtype, seed=seed) for seed in (2, 3))
    return norm.add_rms_norm(x, residual, random(2, shape[1], seed=1)[1], 1e-5, way)


def silu(shape: tuple[int, int], dtype: torch.dtype, way: Quantization | None) -> tuple[Rows, ...]:
    return (activation.silu_mul(random(shape[0], 2 * shape[1], dtype=dtype), way),)


def gelu(shape: tuple[int, int], dtype: torch.dtype, way: Quantization | None) -> tuple[Rows, ...]:
    return (activation.gelu_tanh_mul(random(shape[0], 2 * shape[1], dtype=dtype), way),)


KERNELS: list[Fused] = [norm_alone, norm_of_sum, silu, gelu]


def finds_difference(kernel: Fused, shape: tuple[int, int], dtype: torch.dtype, way: Quantization) -> bool:
    (plain, *totals), (ours, *own_totals) = kernel(shape, dtype, None), kernel(shape, dtype, way)
    same_totals = all(
        isinstance(own, Tensor) and isinstance(total, Tensor) and torch.equal(own, total)
        for own, total in zip(own_totals, totals, strict=True)
    )
    return differ(ours, quantize_apart(plain, way)) or not same_totals


@pytest.mark.parametrize(
    ("kernel", "way", "dtype"),
    mostly_long_grid(KERNELS, WAYS, DTYPES, every=5),
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_a_fused_kernel_has_the_bits_of_two_kernels(kernel: Fused, way: Quantization, dtype: torch.dtype) -> None:
    for shape in [*SIZES, *(ODD_SIZES if way.block is None else [])]:
        assert not finds_difference(kernel, shape, dtype, way), shape


PLANTED = {
    "the norm is not rounded first": ("norm", "normed.to(tl.float32)", "x * scale * weight", "norm", norm_of_sum),
    "the sum is quantized": ("norm", "normed.to(tl.float32)", "x", "norm", norm_alone),
    "the activation is not rounded first": (
        "activation", "result.to(tl.float32)", "(gate * tl.sigmoid(slope) * up)", "activation", silu
    ),
    "scales of another largest number": ("quantize", "1e-20) / LIMIT", "1e-20) / (LIMIT + 1)", "norm", norm_alone),
    "scales of the first tile": ("quantize", "first // SIZE + index", "index", "activation", gelu),
    "no scales of the last block": ("quantize", "tl.cdiv(n, SIZE)", "n // SIZE - 1", "norm", norm_of_sum),
}  # fmt: skip


@pytest.mark.long  # a test of the tests
@pytest.mark.skipif(DEVICE != "cpu", reason="bugs are planted in the interpreter")
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_detected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, right, wrong, user, kernel = PLANTED[name]
    shape, way = (3, 2176), Quantization(torch.float8_e4m3fn, 128)
    assert not finds_difference(kernel, shape, torch.bfloat16, way)
    monkeypatch.setitem(globals(), user, planted(where, right, wrong, user, tmp_path))
    assert finds_difference(kernel, shape, torch.bfloat16, way)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("kind", ["int8", "float8", "blocks"])
def test_a_product_of_quantized_rows_is_that_of_the_rows(kind: str, is_batch_invariant: bool) -> None:
    x, stored = random(5, 256).cpu(), torch.int8 if kind == "int8" else torch.float8_e4m3fn
    weight = quantize_rows(random(200, 256, seed=1).cpu(), Quantization(stored)).codes
    scales = torch.rand((2, 2) if kind == "blocks" else (200,), generator=torch.Generator().manual_seed(shift(2)))
    product = int8_linear if kind == "int8" else fp8_linear
    way = QUANTIZATION if kind == "int8" else find_quantization(weight, scales)
    assert way.block == (128 if kind == "blocks" else None)
    ours = product(quantize_rows(x, way), weight, scales, is_batch_invariant=is_batch_invariant)
    assert torch.equal(ours, product(x, weight, scales, is_batch_invariant=is_batch_invariant))
