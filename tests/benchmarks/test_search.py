"""Search benchmark on a minimal workload: real processes, a tiny random model and the bundled ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification
from typer.testing import CliRunner

from api.cli.entry.app import app
from benchmarks.engine.checkpoint import checkpoint
from benchmarks.engine.measure import OURS, Listener, Measured, Row
from benchmarks.search import measure as searching
from benchmarks.search import ours, plain
from benchmarks.search.measure import FULL, PLAIN, RESCORING, SearchPlan, measure
from benchmarks.search.report import document, draw, markdown
from benchmarks.search.verifier import verifier
from benchmarks.search.workload import SEPARATOR_ID, Beam, Seen, Shape
from tests.benchmarks.test_workloads import TINY
from tests.prm.checkpoints import score_gap
from tests.seeds import shift

pytestmark = pytest.mark.timeout(240)

SMALL = Shape(prompt=40, rounds=3, beams=4, survivors=2, tokens=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    policy = checkpoint("tiny", TINY, tmp_path_factory.mktemp("models"))
    return policy, verifier(policy)


@pytest.mark.long
def test_a_run_has_both_kinds_of_rows_and_reports_them(tmp_path: Path) -> None:
    plan = SearchPlan(
        model="tiny", sizes={"tiny": TINY}, rounds=1, problems=1, timed=SMALL, wide=SMALL, cache=tmp_path / "cache"
    )
    totals: list[int] = []
    steps: list[str] = []
    said: list[str] = []
    measured = measure(plan, Listener(total=totals.append, step=steps.append, say=said.append))
    assert totals == [len(steps)]
    rows = {(row.case, row.unit, row.peer): row for row in measured.rows}
    timed = "W3 scored, tiny"
    assert set(rows) == {
        ("4 × 3, tiny", "tokens", FULL),
        ("16 × 8, countdown", "tokens", FULL),
        ("16 × 8, words", "tokens", FULL),
        (timed, "tokens", FULL),
        *((timed, unit, peer) for unit in ("tokens/s", "s") for peer in (RESCORING, PLAIN)),
    }
    # By hand: a prompt once, then each step with its separator; at most one token per beam is computed again.
    exact, generated = 40 + 3 * 4 * 6, 3 * 4 * 5
    assert exact <= rows[timed, "tokens", FULL].ours * generated <= exact + 3 * 4
    shown = sum(4 * (40 + 6 * turn) for turn in (1, 2, 3))
    assert rows[timed, "tokens", FULL].peer_value == pytest.approx(shown / generated)
    for row in measured.rows:
        assert row.ratio == pytest.approx(
            row.ours / row.peer_value if row.unit == "tokens/s" else row.peer_value / row.ours
        )
    told = document(plan, measured)
    assert json.loads(json.dumps(told)) == told
    assert "| W3 scored, tiny | " in markdown(told, "reasoner bench search")
    draw(told, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_every_system_computes_the_same_scores(folders: tuple[Path, Path]) -> None:
    """With and without a cache, batched and alone: all systems implement the same scoring."""
    policy, prm = folders
    torch.manual_seed(shift(0))
    root = Beam(tuple(range(300, 340)), ())
    beams = [root.grown(range(400 + i, 405 + i)).grown(range(500, 505)) for i in range(4)]
    theirs = plain.load(policy, 1, prm=str(prm))._score(beams, SMALL, Seen())
    assert max(theirs) - min(theirs) > 1e-4
    for rescoring in (False, True):
        system = ours.load(policy, 1, prm=str(prm), rescoring=rescoring)
        seen = Seen()
        scores = system._loop.run(system._score(beams, SMALL, seen))
        system._loop.run(system._engine.close())
        system._loop.close()
        assert scores == pytest.approx(theirs, abs=score_gap("token_classification", prm))
        assert seen.computed + seen.cached == 4 * 52
        assert (seen.cached == 0) == rescoring


def test_the_verifier_is_the_policy_with_another_head(folders: tuple[Path, Path]) -> None:
    policy, prm = folders
    model = AutoModelForTokenClassification.from_pretrained(prm)
    assert model.config.num_labels == 2
    assert SEPARATOR_ID < 300
    assert verifier(policy) == prm


def test_the_command_prints_one_document_and_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[SearchPlan] = []

    def instead(plan: SearchPlan, listener: Listener) -> Measured:
        plans.append(plan)
        row = Row("W3 scored, 50M", "generated tokens", "tokens/s", 300.0, PLAIN, 60.0, 5.0)
        runs = {"W3 scored, 50M": {OURS: [300.0], PLAIN: [60.0]}}
        return Measured([row], runs, {"torch": "2.13"}, {"read": 2e10, "flops": 1e11})

    monkeypatch.setattr(searching, "measure", instead)
    command = ["bench", "search", "--case", "W3", "--rounds", "2", "--threads", "2", "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told == json.loads((tmp_path / "results.json").read_text())
    assert (told["rows"][0]["ratio"], told["machine"]["threads"]) == (5.0, 2)
    assert "| W3 scored, 50M | 300.0 | 60.0 (5.00×) |" in (tmp_path / "table.md").read_text()
    assert (plans[0].cases, plans[0].rounds) == (("W3",), 2)
    wrong = CliRunner().invoke(app, ["bench", "search", "--case", "W4"], env={"COLUMNS": "200"})
    assert wrong.exit_code == 2
    assert "known are tokens, W3" in wrong.stderr
