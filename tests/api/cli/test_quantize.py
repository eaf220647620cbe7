"""``reasoner quantize`` takes bundled models by name, and says what it wrote."""

from __future__ import annotations

import json
import re
import struct
from math import prod
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from workers.config.types import BUNDLED


def count_weights(file: Path) -> int:
    """Return the numbers in a safetensors file, by its header."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


@pytest.mark.parametrize("named", [True, False])
def test_a_bundled_model_is_quantized_and_its_sizes_and_bits_are_said(named: bool, tmp_path: Path) -> None:
    source, out = BUNDLED / "policy", tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", "policy" if named else str(source), str(out), "--method", "nf4"])
    assert result.exit_code == 0, result.output
    said = re.search(
        r"wrote .*: ([\d.]+) MB instead of ([\d.]+) MB, ([\d.]+) bits a weight instead of ([\d.]+)", result.output
    )
    assert said is not None, result.output
    new, old = (sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (out, source))
    weights = sum(map(count_weights, source.glob("*.safetensors")))
    exact = (new / 1e6, old / 1e6, 8 * new / weights, 8 * old / weights)
    assert said.groups() == tuple(f"{value:.1f}" for value in exact)


def test_a_name_that_is_no_model_is_refused_with_the_names_that_are(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", "polisy", str(tmp_path / "out")])
    assert "'polisy' is neither a bundled model (here: checker, draft, policy" in str(result.exception)
