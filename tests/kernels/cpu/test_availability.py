"""Kernels use the instructions of numba's target, which can differ from those of this processor."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from numba import config

from kernels.cpu import availability

HOST = "+sse2,+fma,+avx,+avx2,+avx512f,+avx512bw,+avx512vnni,+avxvnni,-amx-tile"


@pytest.mark.parametrize(
    ("name", "features", "known"),
    [
        (None, None, {"sse2", "fma", "avx", "avx2", "avx512f", "avx512bw", "avx512vnni", "avxvnni"}),
        ("haswell", None, {"sse2", "fma", "avx", "avx2", "avx512f", "avx512bw", "avx512vnni", "avxvnni"}),
        (None, "-avx512f", {"sse2", "fma", "avx", "avx2"}),
        (None, "-avx512f,+avxvnni", {"sse2", "fma", "avx", "avx2", "avxvnni"}),
        ("haswell", "+avx2,+fma", {"avx2", "fma"}),
        ("haswell", "", set()),
        ("generic", "", set()),
    ],
)
def test_features_are_those_that_numba_compiles_for(
    name: str | None, features: str | None, known: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "get_host_cpu_features", lambda: HOST)
    monkeypatch.setattr(config, "CPU_NAME", name)
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert availability.target_features() == known


@pytest.mark.parametrize(
    ("features", "hwcap", "completed"),
    [
        (None, 1 << 20 | 1, "+neon,-sve,+dotprod"),
        (None, 1, None),
        ("+neon", 1 << 20, "+neon"),
    ],
)
def test_products_of_bytes_of_arm_are_what_linux_says(
    features: str | None, hwcap: int, completed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(getauxval={16: hwcap}.__getitem__))
    monkeypatch.setattr(availability, "get_host_cpu_features", lambda: "+neon,-sve")
    monkeypatch.setattr(config, "CPU_NAME", None)
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert availability.complete_features() == completed
    assert ("dotprod" in availability.target_features()) == bool(completed and "dotprod" in completed)


_PRODUCTS = """
import torch
from kernels.cpu.availability import HAS_BYTE_PRODUCTS, LANES
from kernels.cpu.linear.half import is_supported
from kernels.linear.half import HalfLinear
from kernels.linear.fp32 import Linear
from kernels.linear.int8 import Int8Linear
x = torch.arange(-64, 64).float().view(2, 64)
codes = torch.arange(40 * 64).view(40, 64).remainder(256).sub(128).to(torch.int8)
assert Linear(codes.float())(x).equal(x @ codes.float().T)
for dtype in filter(is_supported, (torch.bfloat16, torch.float16)):
    assert HalfLinear(codes.to(dtype))(x).equal(x @ codes.float().T)
x[:, 0] = 127
assert not HAS_BYTE_PRODUCTS or Int8Linear(codes, torch.ones(40))(x).equal(x @ codes.float().T)
print(LANES)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "max_lanes"),
    [
        ({"NUMBA_CPU_FEATURES": "-avx512f"}, 8),
        ({"NUMBA_CPU_NAME": "rocketlake", "NUMBA_CPU_FEATURES": "-avx512f,+avx2,+fma"}, 8),
        ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}, 8),
        ({"NUMBA_ENABLE_AVX": "0"}, 4),
        ({"NUMBA_CPU_NAME": "generic"}, 4),
    ],
    ids=str,
)
def test_products_are_compiled_for_narrower_targets(settings: dict[str, str], max_lanes: int) -> None:
    """An instruction that the target lacks would end the process."""
    command = [sys.executable, "-c", _PRODUCTS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, env=os.environ | settings)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) <= max_lanes
