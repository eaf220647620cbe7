"""Run the Triton kernels' tests. Without a GPU they are interpreted and compared with float64, and compiled and
inspected; with one (``pytest -m gpu``) the interpreted tests run there.

Triton decides once per process whether it interprets, so each folder runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LONG = pytest.mark.long


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it exists for Linux alone")
@pytest.mark.timeout(1800)  # on a slow machine, beside all other tests
@pytest.mark.parametrize(
    ("folder", "marks"),
    [
        ("interpreted", "not long"),
        ("compiled", "not long"),
        *(pytest.param(folder, "long", marks=LONG) for folder in ("interpreted", "compiled")),
    ],
)
def test_kernels_pass_their_tests_without_a_gpu(folder: str, marks: str) -> None:
    check(folder, marks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.timeout(900)
def test_kernels_pass_their_tests_on_a_gpu() -> None:
    check("interpreted", "", REASONER_TEST_DEVICE="cuda")


def check(folder: str, marks: str, **environment: str) -> None:
    options = ["--tb=short", "--color=no", "--timeout=600", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "triton" / folder)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=1780, cwd=HERE.parents[1], env=os.environ | environment
    )
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}{run.stderr}"
