"""Norms, activations, the write of keys and values, and sampling, compiled for Hopper.

Nothing is spilled, loads are vectors, and registers leave room for enough warps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common.int4 import INT4
from kernels.common.quantization import Quantization
from kernels.triton import activation, int4, kv_write, norm, sampling
from tests.kernels.triton.hopper import compiling
from tests.long import mostly_long

ROW8, BLOCK8 = Quantization(torch.int8), Quantization(torch.float8_e4m3fn, 128)
ROW_FP8 = Quantization(torch.float8_e4m3fn)
F32, F64, I32, I64, BF16 = torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def add_norm(quantization: Quantization) -> None:
    norm.add_rms_norm(empty(16, 4096), empty(16, 4096), empty(4096), 1e-6, quantization)


def write(dtype: torch.dtype, limit: float) -> None:
    scales = empty(2, 8, 64, 16, dtype=F32) if limit else None
    angles, slots = empty(16, 128, dtype=F32), empty(16, dtype=I64)
    cache = empty(2, 8, 64, 16, 128, dtype=dtype)
    kv_write.rotary_write(empty(16, 40, 128), empty(16, 8, 128), angles, angles, slots, cache, scales, limit)


def write_int4() -> None:
    cache, scales = empty(2, 8, 64, 16, 64, dtype=INT4), empty(2, 8, 64, 16, 4, dtype=torch.float16)
    int4.write_packed(empty(16, 16, 128), empty(16, dtype=I64), cache, scales)


def sample() -> None:
    columns: Any = *(empty(8, dtype=dtype) for dtype in (F64, F64, F64, I64, I64, I64, I64)), 0
    sampling.sample(empty(8, 128256, dtype=F32), *columns)


def apply_penalties() -> None:
    starts, *columns = (empty(99, dtype=dtype) for dtype in (I64, I64, F32, torch.bool, F32))
    tensors: Any = starts[:9], *columns, empty(8, 3, dtype=F32)
    sampling.apply_penalties(empty(8, 128256, dtype=F32), *tensors)


CASES: list[tuple[str, Callable[[], object], int, float, int]] = [
    ("norm", lambda: norm.rms_norm(empty(16, 4096), empty(4096), 1e-6), 48, 0.5, 2),
    ("norm of heads", lambda: norm.rms_norm(empty(16, 40, 128), empty(40, 128), 1e-6), 48, 0.5, 2),
    ("norm of a sum", lambda: norm.add_rms_norm(empty(16, 4096), empty(16, 4096), empty(4096), 1e-6), 48, 0.5, 3),
    ("silu", lambda: activation.silu_mul(empty(16, 2 * 14336)), 40, 0.75, 2),
    ("gelu", lambda: activation.gelu_tanh_mul(empty(16, 2 * 14336)), 40, 0.75, 2),
    ("norm to int8", lambda: norm.rms_norm(empty(16, 4096), empty(4096), 1e-6, ROW8), 64, 0.5, 2),
    ("norm of a sum to float8", lambda: add_norm(ROW_FP8), 64, 0.5, 3),
    ("norm of a sum to float8 in blocks", lambda: add_norm(BLOCK8), 64, 0.5, 3),
    ("silu to int8", lambda: activation.silu_mul(empty(16, 2 * 14336), ROW8), 128, 0.25, 2),
    ("silu to float8", lambda: activation.silu_mul(empty(16, 2 * 14336), ROW_FP8), 128, 0.25, 2),
    ("silu to float8 in blocks", lambda: activation.silu_mul(empty(16, 2 * 14336), BLOCK8), 64, 0.5, 2),
    ("write", lambda: write(BF16, 0), 56, 0.5, 4),
    ("write int8", lambda: write(torch.int8, 127), 64, 0.5, 4),
    ("write float8", lambda: write(torch.float8_e4m3fn, 448), 64, 0.5, 4),
    ("write int4", write_int4, 128, 0.25, 4),
    ("sample", sample, 128, 0.25, 4),
    ("apply_penalties", apply_penalties, 40, 0.75, 0),
]


@pytest.mark.parametrize(
    ("launch", "registers", "occupancy", "wide"),
    mostly_long([pytest.param(*case[1:], id=case[0]) for case in CASES], every=4),
)
def test_compiled_kernels_meet_their_limits(
    launch: Callable[[], object], registers: int, occupancy: float, wide: int
) -> None:
    with compiling() as made:
        launch()
    [kernel] = made
    assert kernel.spills == kernel.stack == 0, kernel
    assert kernel.registers <= registers, kernel
    assert kernel.occupancy >= occupancy, kernel
    assert kernel.count("LDG", ".128") + kernel.count("LDGSTS", ".128") >= wide, kernel
