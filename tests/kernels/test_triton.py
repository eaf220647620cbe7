"""The Triton kernels, without a GPU: interpreted and compared with float64, and compiled for one and inspected.

Triton decides for a process whether it interprets, so each of both has a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it exists for Linux alone")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("folder", ["interpreted", "compiled"])
def test_kernels(folder: str) -> None:
    command = [sys.executable, "-m", "pytest", "--tb=short", "--color=no", str(HERE / "triton" / folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=HERE.parents[1])
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}{run.stderr}"
