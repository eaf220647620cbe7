"""``reasoner prm``: rollouts, training and evaluation as processes, and wrong usage of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from tests.chaos.processes import until
from workers.config.types import ConfigError

pytestmark = pytest.mark.timeout(300)

FEW = ("--limit", "3", "--solutions", "2", "--completions", "2")
CASE = {
    "id": "x-0",
    "generator": "somebody",
    "problem": "Use the numbers 2, 3 and 4, each exactly once, with + - * / to reach 24.",
    "steps": ["4 * 3 = 12, left 2 12", "12 * 2 = 24, left 24", "\\boxed{(4 * 3) * 2}"],
    "final_answer_correct": True,
    "label": -1,
}


def reasoner(*arguments: object) -> Any:
    command = [sys.executable, "-m", "api.cli.main", "prm", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_problems_become_a_trained_and_measured_prm(tmp_path: Path) -> None:
    data, prm, cases = tmp_path / "data.jsonl", tmp_path / "prm", tmp_path / "cases.json"
    told = reasoner("rollouts", "countdown", data, *FEW)
    assert told["solutions"] == 6
    assert told["generated"] > 0
    assert told["cached"] > told["prompt"] / 2
    again = reasoner("rollouts", "countdown", data, *FEW)
    assert (again["generated"], again["steps"]) == (0, told["steps"])
    trained = reasoner("train", data, prm, "--epochs", 2, "--batch", 2, "--rate", 1e-3)
    assert trained["examples"] + trained["held_out"] == 6
    cases.write_text(json.dumps([CASE, CASE | {"label": 0, "steps": ["4 + 3 = 7, left 2 7", "nonsense"]}]))
    for model in (prm, "prm"):
        measured = reasoner("evaluate", cases, "--prm", model, "--fit", cases)
        assert (measured["cases"], measured["erroneous"], measured["fitted_on"]) == (2, 1, str(cases))
    # The bundled PRM finds this error and no other.
    assert measured["f1"] == 1.0


def test_rollouts_of_a_model_with_limits_of_its_own_are_sampled(tmp_path: Path) -> None:
    """The bundled policy that thinks has a limit of its thoughts, which is no parameter of the engine's."""
    few = ("--limit", 1, "--solutions", 1, "--completions", 0, "--max-tokens", 40)
    told = reasoner("rollouts", "countdown", tmp_path / "data.jsonl", "--model", "policy-thinking", *few)
    assert told["generated"] == 40


@pytest.mark.long
def test_a_fitted_probe_scores_jobs_through_api_and_worker_for_no_token(tmp_path: Path) -> None:
    data, probe = tmp_path / "data.jsonl", tmp_path / "probe"
    reasoner("rollouts", "countdown", data, "--limit", 12, "--solutions", 4, "--completions", 0)
    trained = reasoner("train", data, probe, "--probe")
    assert [row["layer"] for row in trained["by_layer"]] == [1, 2, 3, 4]
    solve = [sys.executable, "-m", "api.cli.main", "solve", CASE["problem"], "--verifier", "probe", "--seed", "1"]
    for strategy in ("beam", "best_of_n", "weighted_vote"):
        command = [*solve, "--strategy", strategy, "--json"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env=os.environ | {"REASONER_PROBE": str(probe)},
        )
        job = json.loads(done.stdout)
        assert job["status"] == "completed"
        assert job["spec"]["verifier"] == {"kind": "probe", "model": "policy", "aggregation": "last"}
        assert job["usage"]["verifier_computed"] == 0
        assert 0 < job["result"]["confidence"] <= 1
    refused = subprocess.run(
        solve, capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"REASONER_PROBE": "off"}
    )
    assert refused.returncode == 2
    assert "'policy' has no probe" in refused.stderr.replace("\n", " ")


@pytest.mark.long
def test_an_interrupted_command_continues_when_run_again(tmp_path: Path) -> None:
    problems, data = tmp_path / "problems.jsonl", tmp_path / "data.jsonl"
    questions = [f"Use the numbers 2, 3 and {n}, each exactly once, to reach 24." for n in range(400)]
    problems.write_text("".join(json.dumps({"question": one, "answer": "24"}) + "\n" for one in questions))
    few = ("--solutions", "2", "--completions", "2")
    command = [sys.executable, "-m", "api.cli.main", "prm", "rollouts", str(problems), str(data), *few, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        until(lambda: running.poll() is not None or (data.exists() and data.read_bytes()), "it has begun")
        assert running.poll() is None, running.stderr.read()
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "the same command continues" in errors
    assert "KeyboardInterrupt" not in errors
    told = reasoner("rollouts", problems, data, "--limit", 2, *few)
    assert told["solutions"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["rollouts", "nowhere", "out"],
            "'nowhere' is neither a suite (countdown, words, arithmetic, reasoning-gym:TASK) nor a file",
        ),
        (["rollouts", "BAD", "out"], "line 1: 'question' is missing; there are nothing"),
        (["train", "BAD", "out", "--labels", "silver"], "'silver' is not one of"),
        (["train", "BAD", "out"], "line 1: 'steps' is missing"),
        (["evaluate", "BAD"], "line 1: 'steps' is missing; there are nothing"),
        (["evaluate", "BAD", "--threshold", "0.1", "--fit", "BAD"], "not both"),
        (["evaluate", "BAD", "--threshold", "2"], "should be less than or equal to 1"),
    ],
)
def test_wrong_usage_is_explained(tmp_path: Path, arguments: list[str], message: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"nothing": 1}\n')
    given = [str(bad) if one == "BAD" else str(tmp_path / one) if one == "out" else one for one in arguments]
    result = CliRunner().invoke(app, ["prm", *given], env={"COLUMNS": "250"})
    assert result.exit_code == 2, result.stderr
    assert message in " ".join(result.stderr.split())


def test_a_missing_base_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("")
    with pytest.raises(ConfigError, match="base: 'nowhere' is neither a bundled model"):
        CliRunner().invoke(
            app,
            ["prm", "train", str(tmp_path / "data.jsonl"), str(tmp_path / "out"), "--base", "nowhere"],
            catch_exceptions=False,
        )
