"""Quantized copies of the benchmark's checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.process import BenchError

VARIANTS: dict[str, dict[str, Any]] = {
    "int8": {"method": "rtn", "bits": 8, "group_size": None},
    "int4": {"method": "rtn", "bits": 4, "group_size": 64},
}
_VERSION = 2
"""Version of the process's output; copies of an older one are written again."""
_SECONDS = 600.0


def quantized(folder: Path, variant: str) -> Path:
    """Return the quantized checkpoint beside ``folder``, written by ``reasoner quantize``'s process if it is missing.

    Raises ``BenchError``.
    """
    out = folder.with_name(f"{folder.name}-{variant}-v{_VERSION}")
    if not out.exists():
        asked = VARIANTS[variant] | {"model": str(folder), "out": str(out), "calibration": None}
        command = [sys.executable, "-m", "engine.quantization", json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            raise BenchError(f"{folder} was not quantised to {variant}: {(done.stdout + done.stderr)[-500:]}")
    return out
