"""Calibration from trials: a planted curve is recovered, and simulated runs have the cost of real ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from engine.protocol.types import EngineUnavailable
from reasoner.admission.defaults import ModelDefaults
from reasoner.confidence.calibration import Calibration, CalibrationError, Curve
from reasoner.confidence.posterior import FEATURES, Evidence
from reasoner.evaluation.calibrate.calibrate import calibrate
from reasoner.evaluation.calibrate.fitting import (
    RIDGE,
    TREES,
    VOTES,
    Measured,
    Rule,
    _fit_by_newton,
    _logistic,
    choose_bins,
    collect_evidence,
    examples,
    fit_curve,
    hide_repeated_scores,
    list_menu,
    reliability,
    simulate,
    try_menu,
)
from reasoner.evaluation.calibrate.trials import (
    POOL,
    Candidate,
    Trial,
    TrialFile,
    get_problem_key,
    get_stage_name,
    open_suite_to_fit,
    problems_to_fit,
)
from reasoner.evaluation.suites.registry import load_problems
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.verifier_specs import ProbeVerifier
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.seeds import shift
from tests.specs import build_spec

FLAT = Curve(constant=0.0, score=0.0, rival_score=0.0, votes=0.0, rival_votes=0.0)


def candidate(answer: str | None, *, right: bool = False, score: float | None = 0.5) -> Candidate:
    return Candidate(answer=answer, score=score if answer else None, right=right, generated=10, verified=7)


def trial(problem: str, stage: str, candidates: list[Candidate], tokens: int = 100, suite: str = "a") -> Trial:
    return Trial(suite=suite, problem=problem, stage=stage, candidates=candidates, tokens=tokens)


def measured(pool: list[Candidate], suite: str = "a", **trees: Trial) -> Measured:
    return Measured(suite, tuple(pool), head=20.0, each=7.0, stages=dict(trees))


def test_a_probe_costs_its_samples_one_score_per_answer_and_one_prefill_of_the_question() -> None:
    one = measured([candidate("1"), candidate("1"), candidate("2", right=True), candidate(None)])
    path = simulate(one, (), Rule(FLAT, 0.95))
    assert path.tokens == 20 + 2 * 10 + 1 * 7
    further = simulate(one, VOTES[:2], Rule(FLAT, 0.95))
    assert further.tokens == path.tokens + 2 * 10 + 1 * 7  # the third has a new answer, the fourth has not


def test_a_simulated_search_stops_at_its_confidence_and_counts_the_question_once() -> None:
    tree = get_stage_name(TREES[0])
    found = trial("p", tree, [candidate("3", right=True, score=0.99)], tokens=300)
    one = Measured("a", (candidate("1"), candidate("2")), 20.0, 7.0, {tree: found})
    trusting = FLAT.model_copy(update={"score": 1.0})
    assert simulate(one, (TREES[0],), Rule(trusting, 0.9)) == simulate(one, (TREES[0], *VOTES), Rule(trusting, 0.9))
    assert simulate(one, (TREES[0],), Rule(trusting, 0.9)).right
    assert simulate(one, (TREES[0],), Rule(trusting, 0.9)).tokens == 20 + 2 * 10 + 2 * 7 + 280
    assert simulate(one, (TREES[0],), Rule(trusting, 0.4)).tokens == 20 + 2 * 10 + 2 * 7


def test_one_candidate_per_answer_has_its_score() -> None:
    pool = [candidate("1", score=0.1), candidate("1", score=0.9), candidate(None), candidate("2", score=0.3)]
    assert collect_evidence(hide_repeated_scores(pool)) == [(Evidence(2, 0.1), False), (Evidence(1, 0.3), False)]
    assert collect_evidence(hide_repeated_scores(pool, scored=["2"]))[1] == (Evidence(1, None), False)


def planted(count: int, seed: int) -> list[Measured]:
    """Return problems with one sample each, right with a probability half as extreme in log-odds as its score says."""
    rng = random.Random(shift(seed))
    problems = []
    for _ in range(count):
        odds = rng.uniform(-5, 5)
        right = rng.random() < 1 / (1 + np.exp(-0.5 * odds))
        problems.append(measured([candidate("1", right=right, score=float(1 / (1 + np.exp(-odds))))]))
    return problems


def test_the_curve_recovers_a_planted_relation_and_reports_that_it_fits() -> None:
    curve = fit_curve(planted(4000, 1))
    fresh = planted(4000, 2)
    rows, right, _ = examples(fresh)
    predicted = 1 / (1 + np.exp(-rows @ np.array([getattr(curve, name) for name in FEATURES])))
    # The number of right answers minus the sum of the predicted probabilities: z is standard normal.
    z = (right.sum() - predicted.sum()) / np.sqrt((predicted * (1 - predicted)).sum())
    assert 2 * stats.norm.sf(abs(z)) > 0.01
    assert curve.score == pytest.approx(0.5, abs=0.05)
    held = reliability(curve, fresh)
    assert held.ece < 0.03
    assert held.brier == pytest.approx(float(np.mean((predicted - right) ** 2)))
    overconfident = curve.model_copy(update={"score": 1.0})
    assert reliability(overconfident, fresh).ece > 0.05


def test_each_difficulty_gets_the_strategy_that_helps_it() -> None:
    """Votes suffice for questions with high scores; only the first tree search solves those with low ones."""
    problems = []
    for number in range(40):
        easy = number % 2 == 0
        score = 0.9 if easy else 0.001
        pool = [candidate(str(i), score=score) for i in range(2)]
        pool += [candidate("7", right=easy, score=score) for _ in range(14)]
        trees = {
            get_stage_name(tree): trial(
                "p", get_stage_name(tree), [candidate("9", right=not easy and tree is TREES[0], score=0.99)], tokens=500
            )
            for tree in TREES
        }
        problems.append(Measured("a", tuple(pool), 20.0, 7.0, trees))
    curve = Curve(constant=-1.0, score=0.5, rival_score=0.0, votes=1.0, rival_votes=0.0)
    hard, easy_bin = choose_bins(problems, try_menu(problems, Rule(curve, 0.99), list_menu(TREES)), worth=10_000)
    assert hard.stages == [TREES[0]]
    assert {stage.name for stage in easy_bin.stages} == {"self_consistency"}
    assert (hard.accuracy, easy_bin.accuracy, hard.problems, easy_bin.problems) == (1.0, 1.0, 20, 20)
    assert easy_bin.below == 1.0


def test_a_fit_uses_no_evaluated_problems_and_covers_every_level() -> None:
    problems = problems_to_fit("countdown", 30)
    reported = {problem.id for problem in load_problems("countdown")}
    assert not reported & {problem.id for problem in problems}
    assert len({problem.id for problem in problems}) == 30
    assert {level: sum(problem.level == level for problem in problems) for level in ("n3", "n4", "n5")} == {
        "n3": 10,
        "n4": 10,
        "n5": 10,
    }


def test_measurements_resume_and_are_refused_for_another_setting(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    file = TrialFile(path, {"seed": 1})
    file.add(trial("p", get_stage_name(POOL), [candidate("1"), candidate(None)]))
    file.add(trial("q", get_stage_name(POOL), [candidate("2")]))
    assert TrialFile(path, {"seed": 1}).trials == file.trials
    path.write_text(path.read_text()[:-20])  # as after a power failure
    torn = TrialFile(path, {"seed": 1})
    assert set(torn.trials) == {("p", get_stage_name(POOL))}
    torn.add(trial("q", get_stage_name(POOL), [candidate("2")]))
    assert TrialFile(path, {"seed": 1}).trials == file.trials
    with pytest.raises(CalibrationError, match="other measurements"):
        TrialFile(path, {"seed": 2})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "nonsense", *lines[1:]]) + "\n")
    with pytest.raises(CalibrationError, match="line 2: not a measurement"):
        TrialFile(path, {"seed": 1})


def test_a_fit_whose_newton_steps_would_overflow_reaches_the_minimum() -> None:
    rows = np.array(
        [
            [1.0, -2.0, -6.0, 0.0, 0.648],
            [1.0, -2.0, 6.0, 2.485, 2.108],
            [1.0, 0.5, -6.0, 1.386, 0.938],
            [1.0, -6.0, 1.0, 2.079, 1.848],
            [1.0, -2.0, -6.0, 0.693, 0.771],
            [1.0, -2.0, -6.0, 2.303, 0.448],
        ]
    )
    right = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    weight = np.array([0.1673, 0.0525, 0.2477, 0.1807, 0.1682, 0.1837])
    values = _fit_by_newton(rows, right, weight)
    gradient = rows.T @ (weight * (_logistic(rows @ values) - right)) + RIDGE * values
    assert np.abs(gradient).max() < 1e-10


def test_a_fit_without_any_answer_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="of 3 problems no solution states an answer"):
        fit_curve([measured([candidate(None)] * 16)] * 3)


def write_problems(path: Path, count: int = 24) -> Path:
    lines = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def test_calibration_works_on_any_suite(tmp_path: Path) -> None:
    suite = open_suite_to_fit(str(write_problems(tmp_path / "sums.jsonl")), 6)
    told: list[tuple[int, int]] = []

    async def run() -> Calibration:
        return await calibrate(
            [suite],
            ScriptedEngine(),
            tmp_path / "trials.jsonl",
            "reasoner calibrate sums.jsonl",
            seed=1,
            concurrency=8,
            progress=lambda done, total: told.append((done, total)),
        )

    table = await run()
    assert (table.suites, table.problems) == (["sums"], 6)
    assert told[-1] == (18, 18)
    assert sum(part.problems for part in table.bins) == 6
    trials = (tmp_path / "trials.jsonl").read_text()
    assert await run() == table  # and measures nothing again
    assert (tmp_path / "trials.jsonl").read_text() == trials


async def test_a_table_for_a_probe_holds_for_jobs_that_the_probe_scores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    suite = open_suite_to_fit(str(write_problems(tmp_path / "sums.jsonl")), 6)
    table = await calibrate(
        [suite],
        ScriptedEngine(probes=True),
        tmp_path / "trials.jsonl",
        "c",
        seed=1,
        concurrency=8,
        progress=lambda *_: None,
        verifier=ProbeVerifier(),
        defaults={"policy": ModelDefaults(system="Count.")},
    )
    assert table.verifier is not None
    assert table.verifier.fingerprint == "scripted"
    for kind, is_fitting in (("probe", True), ("prm", False)):
        journal = MemoryJournal()
        spec = build_spec({"problem": "?", "verifier": {"kind": kind}, "strategy": {"name": "auto"}, "seed": 1})
        await run_job(spec, ScriptedEngine(probes=True), journal, calibration=table)
        plan = next(entry.data for entry in journal.entries if entry.type == "decision")
        assert plan["calibrated"] is is_fitting
    caplog.clear()
    revise = {"problem": "?", "verifier": None, "strategy": {"name": "revise", "n": 2}, "seed": 1}
    await run_job(build_spec(revise), ScriptedEngine(probes=True), MemoryJournal(), calibration=table)
    assert not caplog.text  # it reads no table


async def test_a_table_for_a_thinking_model_is_fitted_on_votes_and_searches_that_save_thoughts(tmp_path: Path) -> None:
    suite = open_suite_to_fit(str(write_problems(tmp_path / "sums.jsonl")), 24)
    table = await calibrate(
        [suite],
        ScriptedEngine(thinks=True),
        tmp_path / "trials.jsonl",
        "c",
        seed=1,
        concurrency=8,
        progress=lambda *_: None,
        verifier=None,
    )
    assert table.verifier is None
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()[1:]
    measured = {Trial.model_validate_json(line).stage for line in lines}
    assert measured == {"self_consistency n=16", "early_exit n=8", "first_finished first=3 n=8"}
    for verifier, is_fitting in ((None, True), ({"kind": "prm"}, False)):
        journal = MemoryJournal()
        spec = build_spec({"problem": "?", "verifier": verifier, "strategy": {"name": "auto"}, "seed": 1})
        outcome = await run_job(spec, ScriptedEngine(thinks=True), journal, calibration=table)
        plan = next(entry.data for entry in journal.entries if entry.type == "decision")
        assert plan["calibrated"] is is_fitting
        assert outcome.status == "completed"


async def test_an_engine_failure_ends_a_calibration_with_the_engines_error(tmp_path: Path) -> None:
    suite = open_suite_to_fit(str(write_problems(tmp_path / "sums.jsonl")), 20)
    with pytest.raises(EngineUnavailable):
        await calibrate(
            [suite],
            ScriptedEngine(die_after=30),
            tmp_path / "trials.jsonl",
            "c",
            seed=1,
            concurrency=4,
            progress=lambda *_: None,
        )


def test_a_changed_line_is_another_problem(tmp_path: Path) -> None:
    file = write_problems(tmp_path / "sums.jsonl")
    before = [get_problem_key(problem) for problem in open_suite_to_fit(str(file), 20).problems]
    file.write_text(file.read_text().replace("What is 3 + 1", "What is 2 + 2"))
    after = [get_problem_key(problem) for problem in open_suite_to_fit(str(file), 20).problems]
    assert [a == b for a, b in zip(before, after, strict=True)].count(False) == 1
