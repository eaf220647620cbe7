"""Products of bytes take ARM's instructions for them, which any processor can assemble but not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

from kernels.cpu.linear.ggml.formats import FORMATS
from tests.kernels.cpu.assemble_arm import ENVIRONMENT, ROWS

_VECTORS = 4
"""Vectors of a row of a tile."""


def test_every_four_products_of_bytes_are_one_instruction() -> None:
    command = [sys.executable, "-m", "tests.kernels.cpu.assemble_arm"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, env=os.environ | ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    assemblies = json.loads(run.stdout)
    assert set(assemblies) == {"int8", "int4", *FORMATS}
    for name, assembly in assemblies.items():
        counts = Counter(re.findall(r"^\t([a-z]\w+)", assembly, re.MULTILINE))
        # A step has 16 columns, a group of a block 32.
        quads = 8 if name in FORMATS else 4
        assert counts["sdot"] == ROWS * _VECTORS * quads, name
        has_table = name in FORMATS and FORMATS[name].table is not None
        assert counts["tbl"] == (_VECTORS * quads if has_table else 0), name
        assert counts["bl"] == 0, name  # no call of a library
