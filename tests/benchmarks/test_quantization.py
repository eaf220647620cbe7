"""The quantisation report and its command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from benchmarks.quantization import kv, report
from benchmarks.quantization.quality import open_model
from benchmarks.quantization.report import Size, document, draw, markdown, measure, pareto
from benchmarks.quantization.texts import texts
from engine.text.tokenizer import Tokenizer
from tests.engine.conftest import save_checkpoint

POLICY = Path(__file__).parents[2] / "reasoner" / "bundled" / "policy"


def test_a_report_measures_the_original_and_each_format_on_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "VARIANTS", {"int8": ("rtn", 8, None), "int4 rtn": ("rtn", 4, 32)})
    size, heard = Size(calibration=1, texts=4, problems=2, rounds=2), []
    rows, lengths = measure(POLICY, size, lambda done, total, following: heard.append((done, total, following)))
    rounds = [(3, 5, "speed, round 1 of 2"), (4, 5, "speed, round 2 of 2")]
    assert heard == [(0, 5, "float32"), (1, 5, "int8"), (2, 5, "int4 rtn"), *rounds, (5, 5, "done")]
    original, int8, int4 = rows
    assert original.divergence == 0
    assert 0 < int8.divergence < int4.divergence / 4
    assert original.bytes > 3 * int8.bytes > 3 * int4.bytes
    assert all(row.tokens_per_second > 0 and 0 <= row.accuracy <= 1 and row.perplexity > 1 for row in rows)
    unseen = [len(text.tokens) for text in texts(Tokenizer(POLICY, 4096), "heldout", 4)]
    assert (lengths.mean, lengths.longest, lengths.solution) == (sum(unseen) / 4, max(unseen), 200)
    told = document(rows, size, lengths)
    assert json.loads(json.dumps(told)) == told
    assert told["rows"][1] == asdict(int8)
    assert markdown(rows).count("\n") == 5
    draw(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_pareto_front_has_the_points_that_no_other_dominates() -> None:
    points = [(1.0, 0.5), (2.0, 0.4), (2.0, 0.3), (3.0, 0.35), (4.0, 0.9), (0.5, 0.0)]
    assert pareto(points) == [(0.5, 0.0), (2.0, 0.3), (3.0, 0.35), (4.0, 0.9)]


def test_the_command_writes_a_checkpoint_or_gives_the_reason_in_one_line(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_checkpoint("llama", source)
    command = ["quantize", str(source), str(out), "--method", "rtn"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    assert {path.name for path in source.iterdir()} - {path.name for path in out.iterdir()} == {"model.safetensors"}
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert again.stderr.strip().endswith(f"reasoner: {out} exists already; name a new folder")


@pytest.mark.parametrize("wrong", [["MODEL"], ["MODEL", "OUT", "--json"], ["MODEL", "OUT", "--report"]])
def test_incompatible_arguments_are_a_usage_error(wrong: list[str]) -> None:
    assert CliRunner().invoke(app, ["quantize", *wrong]).exit_code == 2


def test_the_loss_by_quantized_keys_and_values_grows_as_their_bytes_shrink() -> None:
    model = open_model(POLICY)
    items = [(text.tokens, text.prompt) for text in texts(Tokenizer(POLICY, 4096), "heldout", 3)]
    exact, int8, fp8, int4 = rows = kv.measure_loss("policy", model, items)
    assert [row.kv_dtype for row in rows] == ["auto", "int8", "fp8", "int4"]
    assert (exact.divergence, exact.agreement) == (0, 1)
    assert 0 < int8.divergence < fp8.divergence < int4.divergence < 0.05
    # Four layers of two heads of 32 numbers, keys and values.
    assert [row.bytes_per_token for row in rows] == [16 * size for size in (128, 36, 36, 18)]
    steps = {"100": dict.fromkeys(("auto", "int8", "fp8", "int4"), 1.0)}
    table = kv.markdown({"rows": [asdict(row) for row in rows], "steps": steps})
    assert "| policy | int4 | 288 |" in table
    assert "| float32 | 1.0 ms |" in table
