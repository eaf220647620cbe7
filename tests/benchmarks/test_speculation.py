"""Speculation benchmark on a minimal workload: real processes, the bundled policy, a tiny random model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from benchmarks.engine import speculation
from benchmarks.engine.measure import Listener, Measured, Row
from benchmarks.engine.process import BenchError
from benchmarks.engine.speculation import WIDE, SpeculationPlan, Work, measure
from benchmarks.engine.speculation_report import document, draw, markdown
from tests.benchmarks.test_workloads import TINY

pytestmark = pytest.mark.timeout(240)


@pytest.mark.long
def test_every_drafter_is_compared_with_plain_decoding_and_with_transformers(tmp_path: Path) -> None:
    plan = SpeculationPlan(
        cases=("batch-1", "thoughts", "250M", "W3", "policy-250M"),
        rounds=1,
        large=TINY,
        right=(0.8,),
        wide=replace(WIDE, hidden=192, layers=5, heads=6, kv_heads=3, intermediate=320),
        work=Work(
            problems={1: 2}, tokens={4: 24}, thoughts=1, thought_tokens=24, searches=1, wide_searches=1, warm_up=2
        ),
        cache=tmp_path,
    )
    totals: list[int] = []
    steps: list[str] = []
    said: list[str] = []
    measured = measure(plan, Listener(total=totals.append, step=steps.append, say=said.append))
    assert totals == [len(steps)]
    rows = {(row.case, row.metric, row.peer): row for row in measured.rows}
    speed = "generated tokens"
    for drafter in ("draft_model", "ngram", "controller"):
        assert rows[f"batch 1 {drafter}", speed, "plain"].ours > 0
        assert rows[f"batch 1 {drafter}", "tokens per branch and step", "plain"].ours >= 1
    assert rows["batch 1 draft_model", speed, "transformers-assisted"].peer_value > 0
    assert rows["batch 1 ngram", speed, "transformers-assisted"].peer_value > 0
    assert rows["batch 1 controller", speed, "always 4"].ours == rows["batch 1 controller", speed, "plain"].ours
    assert rows["thoughts ngram", speed, "plain"].ours == rows["thoughts ngram", speed, "n-grams of 1 to 4"].ours > 0
    assert rows["250M 0.8 batch 4", speed, "plain"].ratio > 0
    # For chains of up to 16 draft tokens, each correct four times in five: at least a fifth.
    assert 20 < rows["250M 0.8 batch 4", "accepted draft tokens", "all draft tokens"].ours <= 100
    for case in ("W3 sibling-ngram", "W3 controller", "policy-250M W3 sibling-ngram", "policy-250M W3 controller"):
        assert rows[case, speed, "plain"].ratio > 0
        # Draft tokens take no pages from the cache: the hit rate is the same.
        assert rows[case, "cache hit rate", "plain"].ratio == pytest.approx(1)
    for row in measured.rows:
        assert row.ratio == pytest.approx(row.ours / row.peer_value)
    told = document(plan, measured)
    assert json.loads(json.dumps(told)) == told
    assert "| batch 1 ngram | " in markdown(told, "reasoner bench engine --speculation")
    draw(told, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_system_with_other_answers_than_plain_decoding_is_refused() -> None:
    truth = [[1, 2]] * 100
    speculation._compare("eagle", [[1, 2]] * 97 + [[1, 3]] * 3, truth)
    with pytest.raises(BenchError, match="eagle answers 4 of 100 prompts otherwise"):
        speculation._compare("eagle", [[1, 2]] * 96 + [[1, 3]] * 4, truth)


def test_a_folder_without_a_head_is_named(tmp_path: Path) -> None:
    listener = Listener(total=lambda _: None, step=lambda _: None, say=lambda _: None)
    with pytest.raises(BenchError, match="holds no drafting head"):
        measure(SpeculationPlan(cases=("W3",), heads=(str(tmp_path),)), listener)


def test_the_command_runs_the_plan_and_prints_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[SpeculationPlan] = []

    def instead(plan: SpeculationPlan, listener: Listener) -> Measured:
        plans.append(plan)
        row = Row("batch 4 controller", "generated tokens", "tokens/s", 200.0, "plain", 100.0, 2.0)
        return Measured([row], {}, {"torch": "2.13"}, {"read": 2e10, "flops": 1e11})

    monkeypatch.setattr(speculation, "measure", instead)
    command = ["bench", "engine", "--speculation", "--case", "batch-4,W3", "--head", "a, b", "--rounds", "2", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    assert [row["case"] for row in json.loads(result.stdout)["rows"]] == ["batch 4 controller"]
    assert (plans[0].cases, plans[0].heads, plans[0].rounds) == (("batch-4", "W3"), ("a", "b"), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--speculation", "--case", "W1"],
            "batch-64, thoughts, policy-large, 250M, W3, policy-250M",
        ),
        (["--speculation", "--peer", "transformers"], "have no effect with it"),
        (["--head", "somewhere"], "it needs --speculation"),
    ],
)
def test_wrong_usage_is_answered_with_the_valid_choice(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", *arguments], env={"COLUMNS": "250"})
    assert result.exit_code == 2
    assert message in result.stderr
