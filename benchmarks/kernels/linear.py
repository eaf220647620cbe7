"""Products with quantized weights compared with the bfloat16 product of cuBLAS, at the shapes of an 8B model.

The time includes the rounding of activations to 8 bits if a format requires it. The expected result is that of the
dequantized weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.measure import Case, Run, Runs
from kernels.linear import nf4, weight_only_int4
from kernels.linear.fp8 import BLOCK, fp8_linear
from kernels.linear.nf4 import Nf4, nf4_linear
from kernels.linear.weight_only_int4 import int4_linear, pack_int4
from kernels.linear.weight_only_int8 import int8_linear, int8_weight_linear
from kernels.quantize import quantize_vectors

SHAPES = ((4096, 6144), (4096, 28672), (14336, 4096))
"""Inputs and outputs: query-key-value, gate and up, down."""
ROWS = (1, 16, 64, 256)
_INT4_ROWS = (4, 8)
"""Further numbers of rows of the format whose products should gain most up to 16."""
_GROUP = 128
_FP8 = torch.float8_e4m3fn

_Make = Callable[[Tensor, int, int], tuple[Run, Tensor, float]]
"""Takes activations, inputs and outputs; returns the product, its dequantized weight, and the tolerance."""


def cases(rows: tuple[int, ...] = ROWS, shapes: tuple[tuple[int, int], ...] = SHAPES) -> Iterator[Case]:
    """Yield all formats at all shapes and numbers of rows, 4-bit weights at some more of them by default."""
    for name, bits, numbers, make in _FORMATS:
        for into, out in shapes:
            for count in sorted({*rows, *(_INT4_ROWS if name == "int4" and rows == ROWS else ())}):
                moved = into * out * bits / 8 + 2 * count * (into + out)
                yield Case(
                    f"{name}, {into} → {out}, {count} rows",
                    int(moved),
                    partial(_runs, make=make, into=into, out=out, rows=count),
                    2.0 * count * into * out,
                    numbers,
                )


def _runs(device: torch.device, make: _Make, into: int, out: int, rows: int) -> Runs:
    x = torch.randn(rows, into, device=device, dtype=torch.bfloat16)
    ours, wide, tolerance = make(x, into, out)
    narrow = wide.bfloat16()
    return Runs(ours, {"bfloat16": lambda: F.linear(x, narrow)}, lambda: F.linear(x.float(), wide), tolerance)


def _int4(x: Tensor, into: int, out: int) -> tuple[Run, Tensor, float]:
    codes = torch.randint(0, 16, (out, into), device=x.device, dtype=torch.uint8)
    scales = torch.rand(into // _GROUP, out, device=x.device, dtype=torch.float16)
    zeros = torch.randint(1, 16, scales.shape, device=x.device, dtype=torch.uint8)
    weight = pack_int4(codes, scales, zeros)
    return lambda: int4_linear(x, weight), weight_only_int4.dequantize(weight), 0.02


def _nf4(x: Tensor, into: int, out: int) -> tuple[Run, Tensor, float]:
    packed = torch.randint(0, 256, (out, into // 2), device=x.device, dtype=torch.uint8)
    weight = Nf4(packed, torch.rand(into // 64, out, device=x.device))
    return lambda: nf4_linear(x, weight), nf4.dequantize(weight), 0.02


def _numbers(x: Tensor, into: int, out: int, stored: torch.dtype) -> Tensor:
    return quantize_vectors(torch.randn(out, into, device=x.device), stored)[0]


def _int8_weight(x: Tensor, into: int, out: int) -> tuple[Run, Tensor, float]:
    weight, scales = _numbers(x, into, out, torch.int8), torch.rand(1, out, device=x.device)
    return lambda: int8_weight_linear(x, weight, scales), weight.float() * scales.T, 0.02


def _int8(x: Tensor, into: int, out: int) -> tuple[Run, Tensor, float]:
    weight, scales = _numbers(x, into, out, torch.int8), torch.rand(out, device=x.device)
    return lambda: int8_linear(x, weight, scales), weight.float() * scales[:, None], 0.05


def _fp8(x: Tensor, into: int, out: int) -> tuple[Run, Tensor, float]:
    weight, scales = _numbers(x, into, out, _FP8), torch.rand(out, device=x.device)
    return lambda: fp8_linear(x, weight, scales), weight.float() * scales[:, None], 0.1


def _fp8_blocks(x: Tensor, into: int, out: int) -> tuple[Run, Tensor, float]:
    weight = _numbers(x, into, out, _FP8)
    scales = torch.rand(-(-out // BLOCK), into // BLOCK, device=x.device)
    spread = scales.repeat_interleave(BLOCK, dim=0)[:out].repeat_interleave(BLOCK, dim=1)
    return lambda: fp8_linear(x, weight, scales), weight.float() * spread, 0.1


_FORMATS: tuple[tuple[str, float, torch.dtype, _Make], ...] = (
    ("int4", 4 + 24 / _GROUP, torch.bfloat16, _int4),
    ("NF4", 4 + 32 / 64, torch.bfloat16, _nf4),
    ("int8 weights", 8, torch.bfloat16, _int8_weight),
    ("int8", 8, torch.int8, _int8),
    ("float8 by channel", 8, _FP8, _fp8),
    ("float8 by block", 8, _FP8, _fp8_blocks),
)
"""Name, bits of a weight with its scales and zeros, type of the numbers that are multiplied, and constructor."""
