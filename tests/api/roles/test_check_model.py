"""``reasoner engine --check``."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from api.roles import check_model

WIDE = {"COLUMNS": "120"}
DOCUMENT: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "layouts": {"int8": 7, "float32": 1},
    "texts": [
        {
            "name": "prose",
            "tokens": 20,
            "difference": 0.5,
            "relative": 0.25,
            "top1_agreement": 0.5,
            "perplexity": 12.5,
            "reference_perplexity": 10.25,
        }
    ],
    "error": [0.5, 2.0],
    "expected": [0.01, 0.05],
    "accepted": [2.0, 4.0],
    "is_close": False,
}


def test_a_bundled_model_is_as_close_to_transformers_as_rounding_allows() -> None:
    result = CliRunner().invoke(app, ["engine", "--check", "policy"], env=WIDE)
    assert result.exit_code == 0, result.output
    assert "Qwen3ForCausalLM: float16 (16 products)" in result.stdout
    assert "as close as rounding allows" in result.stdout


def test_a_model_that_is_apart_gives_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_model, "compute", lambda module, request, console: DOCUMENT)
    result = CliRunner().invoke(app, ["engine", "--check", "policy=policy"], env=WIDE)
    assert result.exit_code == 1
    for shown in ("50.0%", "12.5", "10.25", "int8 (7 products), float32 (1 products)", "rounded to 8 bits", "apart"):
        assert shown in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--check", "/nowhere"], "'/nowhere' is neither a bundled model"),
        (["--check", "policy", "--device", "cuda"], "--check takes no other option"),
    ],
)
def test_wrong_use_is_refused_by_name(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["engine", *arguments], env=WIDE)
    assert result.exit_code != 0
    assert named in result.output + str(result.exception)
