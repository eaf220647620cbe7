"""Conversions of 8-bit numbers inside kernels compared with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.cpu.runtime.kernel import kernel, read_arguments
from kernels.cpu.simd.convert_8bit import load_float8, load_int8, store_float8, store_int8
from kernels.cpu.simd.vector import load, store
from tests.seeds import shift


@kernel
def _to_float32(address: Any) -> None:
    """Kernel with the arguments ``(codes, out, count, is_int8)``."""
    a, _, _ = read_arguments(address)
    for i in range(0, a[2], 16):
        store(a[1] + 4 * i, load_int8(a[0] + i) if a[3] else load_float8(a[0] + i))


@kernel
def _to_8_bits(address: Any) -> None:
    """Kernel with the arguments ``(numbers, out, count, is_int8)``."""
    a, _, _ = read_arguments(address)
    for i in range(0, a[2], 16):
        if a[3]:
            store_int8(a[1] + i, load(a[0] + 4 * i))
        else:
            store_float8(a[1] + i, load(a[0] + 4 * i))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_code_is_converted_to_float32_as_by_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    out = torch.empty(256)
    _to_float32(codes, out, 256, int(dtype == torch.int8), threads=1)
    expected = codes.float()
    finite = expected.isfinite()
    assert finite.sum() == (256 if dtype == torch.int8 else 254)
    assert torch.equal(out[finite].view(torch.int32), expected[finite].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_numbers_are_rounded_to_8_bits_as_by_torch(dtype: torch.dtype) -> None:
    """Numbers of all magnitudes, representable ones, midpoints between these, and the floats next to midpoints."""
    generator = torch.Generator().manual_seed(shift(0))
    codes = torch.arange(256).to(torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite() & (codes.abs() <= 448)].sort().values
    midpoints = (codes[1:] + codes[:-1]) / 2
    spread = torch.randn(4096, generator=generator) * torch.exp2(torch.randint(-20, 8, (4096,), generator=generator))
    numbers = [
        codes,
        midpoints,
        midpoints.nextafter(torch.tensor(1e9)),
        midpoints.nextafter(torch.tensor(-1e9)),
        spread,
    ]
    x = torch.cat(numbers)
    limit = 127 if dtype == torch.int8 else 448
    x = x.clamp(-limit, limit)
    x = torch.cat((x, torch.zeros(-len(x) % 16)))
    out = torch.empty(len(x), dtype=torch.uint8)
    _to_8_bits(x, out, len(x), int(dtype == torch.int8), threads=1)
    expected = (x.round() if dtype == torch.int8 else x).to(dtype).view(torch.uint8)
    assert torch.equal(out, expected)
