"""The strategies auto and best_first, and their calibration table."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import EngineUnavailable, ModelInfo, ProbeInfo
from reasoner.admission.calibration import load_calibration
from reasoner.confidence.calibration import (
    SHIPPED_CALIBRATION,
    Calibration,
    CalibrationError,
    Curve,
    ModelFingerprint,
)
from reasoner.confidence.posterior import Evidence, compute_features, leader_probability, log_odds
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.verifier_specs import PrmVerifier, ProbeVerifier
from reasoner.run import JobOutcome, run_job
from reasoner.search.replay import ReplayMismatch
from reasoner.strategies.tree.best_first import SOLVABLE, STEP_SUCCESS, choose_nodes, compute_reservation_index
from reasoner.tree import Node
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

CURVE = {"constant": 0.0, "score": 0.0, "rival_score": 0.0, "votes": 0.0, "rival_votes": 0.0}
VOTE = {"name": "self_consistency", "n": 2}
TREE = {"name": "best_first", "n": 2}
BEAM = {"name": "beam", "n": 4, "expansions": 2}


def document(curve: dict[str, float] | None = None, **more: Any) -> dict[str, Any]:
    """A table for the scripted engine: 0.5 for every answer unless the curve says otherwise."""
    part = {"below": 1.0, "stages": [VOTE, TREE], "problems": 1, "accuracy": 0.5, "tokens": 10.0}
    return {
        "version": 1,
        "command": "reasoner calibrate countdown",
        "suites": ["countdown"],
        "problems": 1,
        "policy": {"id": "policy", "parameters": 1000, "vocab_size": 100, "fingerprint": ""},
        "verifier": {"id": "prm", "parameters": 1000, "vocab_size": 100, "fingerprint": ""},
        "confidence": 0.9,
        "probe": 3,
        "curve": CURVE | (curve or {}),
        "bins": [part],
        "reliability": {"answers": 0, "ece": 0.0, "brier": 0.0, "bins": []},
    } | more


def bins(*parts: tuple[float, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{"below": b, "stages": stages, "problems": 1, "accuracy": 0.5, "tokens": 1.0} for b, stages in parts]


async def solve(
    table: dict[str, Any], *, seed: int = 0, n: int = 8, strategy: str = "auto", **more: Any
) -> tuple[JobOutcome, MemoryJournal]:
    journal = MemoryJournal()
    spec = build_spec(
        {"problem": "how?", "strategy": {"name": strategy, "n": n}, "seed": seed, "answer": "text"} | more
    )
    outcome = await run_job(spec, ScriptedEngine(order=seed), journal, calibration=Calibration.model_validate(table))
    return outcome, journal


def roots(journal: MemoryJournal) -> set[str]:
    """Return the texts of the first steps sampled from the question."""
    return {entry.data["node"] for entry in journal.entries if entry.type == "node" and entry.data["parent"] == ""}


def plan(journal: MemoryJournal) -> dict[str, Any]:
    return next(entry.data for entry in journal.entries if entry.type == "decision")


# Decisions of auto.


@pytest.mark.parametrize("seed", range(6))
async def test_a_probe_above_the_confidence_ends_the_search(seed: int) -> None:
    outcome, journal = await solve(document({"constant": 9.0}), seed=seed)
    probed = {entry.data["answer"] for entry in journal.entries if entry.type == "node"} - {None}
    if probed:
        assert roots(journal) == {"0", "1", "2"}
        assert outcome.result.confidence == pytest.approx(1 / (1 + math.exp(-9)))
        scored = [entry.data["node"] for entry in journal.entries if entry.type == "score"]
        assert len(scored) == len(probed)  # one solution of each answer


@pytest.mark.parametrize("seed", range(6))
async def test_a_probe_below_the_confidence_is_followed_by_every_stage_of_its_bin_on_the_same_tree(seed: int) -> None:
    table = document(bins=bins((0.4, [BEAM]), (1.0, [VOTE, VOTE, TREE])))
    outcome, journal = await solve(table, seed=seed)
    chosen = plan(journal)
    assert chosen["stages"][0]["name"] == ("beam" if (chosen["confidence"] or 0.0) < 0.4 else "self_consistency")
    if chosen["stages"][0]["name"] == "self_consistency":
        assert {"3", "4", "5", "6"} <= roots(journal)  # two votes after a probe of three
        answers = Counter(
            entry.data["answer"] for entry in journal.entries if entry.type == "node" and entry.data["answer"]
        )
        assert {vote.answer: vote.count for vote in outcome.result.votes} == answers


@pytest.mark.parametrize("seed", range(6))
async def test_searches_that_save_thoughts_go_on_from_the_samples_of_the_probe(seed: int) -> None:
    stages = [{"name": "early_exit", "n": 3, "every": 8}, {"name": "first_finished", "n": 3, "first": 2}]
    table = Calibration.model_validate(document(probe=2, bins=bins((1.0, stages))) | {"verifier": None})
    journal = MemoryJournal()
    spec = {"problem": "how?", "strategy": {"name": "auto", "n": 8}, "seed": seed, "answer": "text", "verifier": None}
    engine = ScriptedEngine(order=seed, thinks=True)
    outcome = await run_job(build_spec(spec), engine, journal, calibration=table)
    assert plan(journal)["calibrated"]
    assert roots(journal) == {str(index) for index in range(8)}
    assert outcome.result.node is not None


async def test_no_stage_gets_more_than_the_jobs_budget() -> None:
    table = document(probe=1, bins=bins((1.0, [{"name": "self_consistency", "n": 50}])))
    _, journal = await solve(table, n=4)
    assert roots(journal) == {"0", "1", "2", "3", "4"}


async def test_the_jobs_confidence_overrides_the_tables() -> None:
    table = document({"constant": 1.0}, bins=bins((1.0, [VOTE, VOTE])))
    _, eager = await solve(table, confidence=0.7)
    _, careful = await solve(table, confidence=0.75)
    assert 1 / (1 + math.exp(-1.0)) == pytest.approx(0.731, abs=1e-3)
    assert (len(roots(eager)), len(roots(careful))) == (3, 7)


async def test_the_answer_is_the_likeliest_by_the_calibration_curve() -> None:
    votes, _ = await solve(document({"votes": 5.0}, bins=bins((1.0, [{"name": "self_consistency", "n": 8}]))), seed=4)
    assert votes.result.votes[0].count == max(vote.count for vote in votes.result.votes)
    scores, journal = await solve(document({"score": 1.0}, bins=bins((1.0, [{"name": "best_of_n", "n": 8}]))), seed=4)
    best = max((entry for entry in journal.entries if entry.type == "score"), key=lambda entry: entry.data["score"])
    assert scores.result.node == best.data["node"]


async def test_without_a_verifier_auto_votes_in_growing_rounds_until_the_leader_is_safe() -> None:
    class Mute(ScriptedEngine):
        async def models(self) -> list[ModelInfo]:
            return (await super().models())[:1]

    for seed in range(8):
        journal = MemoryJournal()
        spec = build_spec({"problem": "how?", "strategy": {"name": "auto", "n": 16}, "seed": seed, "answer": "text"})
        outcome = await run_job(spec, Mute(order=seed), journal)
        assert [stage["name"] for stage in plan(journal)["stages"]] == ["self_consistency"] * 3
        assert len(roots(journal)) in (2, 4, 8, 16)
        counts, silent = [float(vote.count) for vote in outcome.result.votes], outcome.result.abstained or 0
        assert outcome.result.confidence == pytest.approx(leader_probability(counts, silent))
        assert len(roots(journal)) == 16 or leader_probability(counts, silent) >= 0.95
        assert sum(counts) + silent == len(roots(journal))


async def test_a_table_of_other_models_is_ignored_with_a_warning_that_names_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = document({"constant": 9.0})
    table["verifier"]["parameters"] = 7
    with caplog.at_level(logging.WARNING, "reasoner.run"):
        _, journal = await solve(table)
    assert not plan(journal)["calibrated"]
    assert "prm (7 weights" in caplog.text
    assert "prm (1000 weights" in caplog.text


async def test_a_table_is_ignored_if_the_verifiers_scores_are_aggregated_differently() -> None:
    _, journal = await solve(document({"constant": 9.0}), verifier={"aggregation": "min"})
    assert not plan(journal)["calibrated"]


def test_models_are_compared_by_fingerprint_if_both_sides_have_one() -> None:
    table = Calibration.model_validate(document())
    table.policy.fingerprint = "ab"
    verifier = ModelFingerprint.of_model(ModelInfo("prm", "classify", 256, 100, 1000))

    def compare(id: str, vocab_size: int, fingerprint: str = "") -> str | None:
        served = ModelFingerprint(id=id, parameters=1000, vocab_size=vocab_size, fingerprint=fingerprint)
        return table.find_mismatch(served, verifier)

    assert compare("other-name", 9, fingerprint="ab") is None
    assert "cd" in str(compare("policy", 100, fingerprint="cd"))
    assert compare("policy", 100) is not None


def test_a_probe_is_identified_by_its_own_weights() -> None:
    info = ModelInfo("m", "generate", 256, 100, 1000, fingerprint="ab", probe=ProbeInfo("cd", (1,), 9))
    assert ModelFingerprint.of_verifier(ProbeVerifier(), info).fingerprint == "cd"
    assert ModelFingerprint.of_verifier(PrmVerifier(), info).fingerprint == "ab"


async def test_a_rules_verdict_ends_the_search_without_a_table() -> None:
    verifier = {"kind": "exact", "expected": "1"}
    for seed in range(8):
        outcome, journal = await solve(document(), seed=seed, n=16, verifier=verifier)
        found = any(entry.data["answer"] == "1" for entry in journal.entries if entry.type == "node")
        assert (outcome.result.answer == "1", outcome.result.confidence == 1.0) == (found, found)
        assert found or len(roots(journal)) == 16


# Replay and budget.


@given(
    seed=st.integers(0, 1000),
    tokens=st.one_of(st.none(), st.integers(1, 1500)),
    die_after=st.integers(0, 40),
    constant=st.floats(-1, 3),
)
async def test_auto_with_a_table_resumes_after_a_crash_and_keeps_every_budget(
    seed: int, tokens: int | None, die_after: int, constant: float
) -> None:
    table = Calibration.model_validate(
        document({"constant": constant, "score": 1.0}, bins=bins((0.5, [TREE, BEAM]), (1.0, [VOTE, TREE])))
    )
    job = build_spec(
        {"problem": "how?", "strategy": {"name": "auto", "n": 8}, "seed": seed, "answer": "text"}
        | {"budget": {"tokens": tokens}}
    )
    journal = MemoryJournal()
    with contextlib.suppress(EngineUnavailable):
        await run_job(job, ScriptedEngine(order=seed, die_after=die_after), journal, calibration=table)
    before = list(journal.entries)
    engine = ScriptedEngine(order=seed + 1)
    resumed = await run_job(job, engine, journal, calibration=table)
    assert journal.entries[: len(before)] == before
    if tokens is None:
        fresh = await run_job(job, ScriptedEngine(order=seed + 2), MemoryJournal(), calibration=table)
        assert resumed.result == fresh.result
    else:
        assert resumed.usage.total <= tokens
        assert engine.most <= tokens
    idle = ScriptedEngine()
    again = await run_job(job, idle, MemoryJournal(journal.entries), calibration=table)
    assert (again.result, idle.total) == (resumed.result, 0)


async def test_a_replay_with_another_table_is_refused() -> None:
    _, journal = await solve(document())
    spec = build_spec({"problem": "how?", "strategy": {"name": "auto", "n": 8}, "seed": 0, "answer": "text"})
    other = Calibration.model_validate(document(bins=bins((1.0, [BEAM]))))
    with pytest.raises(ReplayMismatch, match="decide:plan"):
        await run_job(spec, ScriptedEngine(), MemoryJournal(journal.entries), calibration=other)


# Tables.


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"probe": 0}, "probe"),
        ({"version": 2}, "version"),
        ({"colour": "red"}, "colour"),
        ({"confidence": 1.5}, "confidence"),
        ({"curve": CURVE | {"votes": "many"}}, "curve.votes"),
        ({"bins": bins((1.0, [{"name": "beem"}]))}, "bins.0.stages: unknown strategy 'beem'"),
        ({"bins": bins((0.5, []), (1.0, [{"name": "beam", "width": 3}]))}, "bins.1.stages: strategy 'beam': width"),
        ({"bins": bins((1.0, [{"name": "auto"}]))}, "auto cannot be a stage of itself"),
        ({"bins": bins((0.5, []), (0.3, []))}, "must rise and end at 1"),
        ({"bins": []}, "bins"),
    ],
)
def test_a_bad_table_is_refused_with_the_file_and_the_field(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document() | change))
    with pytest.raises(CalibrationError) as error:
        load_calibration(path)
    assert str(path) in str(error.value)
    assert field in str(error.value)


def test_a_missing_or_malformed_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="No such file"):
        load_calibration(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CalibrationError, match="Invalid JSON"):
        load_calibration(tmp_path / "broken.json")


def test_the_shipped_table_is_valid_and_was_fitted_for_the_shipped_models() -> None:
    from engine.fingerprint import fingerprint

    table = load_calibration(SHIPPED_CALIBRATION)
    folder = Path(__file__).parents[3] / "reasoner" / "bundled"
    assert table.policy.fingerprint == fingerprint(folder / "policy")
    assert table.verifier is not None
    assert table.verifier.fingerprint == fingerprint(folder / "prm")


def test_fingerprints_distinguish_training_runs(tmp_path: Path) -> None:
    from engine.fingerprint import fingerprint

    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(300_000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = fingerprint(tmp_path)
    weights[150_001] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert fingerprint(tmp_path) != first
    weights[150_001] = 0
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert fingerprint(tmp_path) == first


def test_the_curve_is_the_logistic_function_computed_by_hand() -> None:
    answers = [Evidence(3, 0.9), Evidence(2, None), Evidence(1, 0.8)]
    assert compute_features(answers, 0) == pytest.approx(
        (1, math.log(9), math.log(4), math.log(3), math.log(3))
    )  # the two unscored
    assert compute_features(answers, 1) == pytest.approx((1, -6, math.log(9), math.log(2), math.log(3.7)))
    curve = Curve(constant=-1.0, score=0.5, rival_score=-0.25, votes=2.0, rival_votes=-1.0)
    odds = -1.0 + 0.5 * math.log(9) - 0.25 * math.log(4) + 2 * math.log(3) - math.log(3)
    assert curve.predict(answers, 0) == pytest.approx(1 / (1 + math.exp(-odds)))
    assert compute_features([Evidence(1, 0.5)], 0) == pytest.approx((1, 0, -6, 0, 0))
    assert [log_odds(p) for p in (None, 0.0, 1.0, 1e-9)] == [-6, -6, 6, -6]


# Order in which best_first expands nodes (Pandora's rule).


def box(path: tuple[int, ...], parent: Node | None, score: float | None, probability: float = 1e-30) -> Node:
    node = Node(path, parent, (), text=f"{path}", reason="step", score=score, logprob=math.log(probability))
    if parent is not None:
        parent.children.append(node)
    return node


def test_the_index_is_the_probability_of_a_success_over_the_chance_of_a_random_step() -> None:
    root = box((), None, None)
    assert compute_reservation_index(root) == pytest.approx(SOLVABLE)
    bad, good = box((0,), root, 0.0), box((1,), root, 0.8)
    # Two different samples: every further one is expected to be new.
    failed = (1 - STEP_SUCCESS) * (1 - STEP_SUCCESS * 0.2)
    assert compute_reservation_index(root) == pytest.approx(SOLVABLE * failed / (SOLVABLE * failed + 1 - SOLVABLE))
    assert compute_reservation_index(good) == pytest.approx(0.8 / STEP_SUCCESS)
    assert compute_reservation_index(bad) == 0.0
    twin = box((2,), root, 0.0)
    twin.text = bad.text
    failed *= 1 - STEP_SUCCESS
    assert compute_reservation_index(root) == pytest.approx(
        1 / 3 * SOLVABLE * failed / (SOLVABLE * failed + 1 - SOLVABLE)
    )


def test_the_index_falls_with_the_probability_of_a_repeated_sample_and_ends_at_zero() -> None:
    root = box((), None, None)
    box((0,), root, 0.5, 0.6)
    unlike = compute_reservation_index(root)
    box((1,), root, 0.5, 0.1)
    failed = (1 - STEP_SUCCESS * 0.5) ** 2
    assert compute_reservation_index(root) == pytest.approx(
        0.3 * SOLVABLE * failed / (SOLVABLE * failed + 1 - SOLVABLE)
    )
    assert compute_reservation_index(root) < unlike
    box((2,), root, 0.5, 0.15)
    assert compute_reservation_index(root) == 0.0


def test_an_unopened_box_gets_one_sample_first_and_the_question_all_that_are_left() -> None:
    root = box((), None, None)
    assert choose_nodes({root: compute_reservation_index(root)}, 4) == {root: 4}
    good = box((0,), root, 0.9)
    assert choose_nodes({root: compute_reservation_index(root), good: compute_reservation_index(good)}, 4) == {
        good: 1,
        root: 3,
    }
    box((0, 0), good, 0.0)
    box((0, 1), good, 0.0)
    assert choose_nodes({root: compute_reservation_index(root), good: compute_reservation_index(good)}, 4) == {
        good: 2,
        root: 2,
    }


@pytest.mark.parametrize("seed", range(6))
async def test_best_first_ends_with_the_first_answer_above_the_confidence(seed: int) -> None:
    outcome, journal = await solve(document({"score": 1.0}), seed=seed, strategy="best_first", confidence=0.7)
    scored = [entry for entry in journal.entries if entry.type == "score"]
    finished = {entry.data["node"] for entry in journal.entries if entry.type == "node" and entry.data["answer"]}
    sure = [entry for entry in scored if entry.data["node"] in finished and entry.data["score"] >= 0.7]
    if sure:
        assert outcome.result.confidence is not None
        assert outcome.result.confidence >= 0.7
        rounds = [entry.data["batch"] for entry in journal.entries]
        assert sum(batch > sure[0].data["batch"] for batch in rounds) <= 2 * 4 + 1  # the rest of its round, the choice


async def test_a_vote_stops_at_the_jobs_confidence_in_its_leader() -> None:
    for seed in range(8):
        outcome, journal = await solve(document(), seed=seed, n=16, strategy="self_consistency", confidence=0.9)
        counts = [float(vote.count) for vote in outcome.result.votes]
        left = 16 - len(roots(journal))
        lead = counts[0] - (counts[1] if len(counts) > 1 else 0.0)
        assert leader_probability(counts) >= 0.9 or left == 0 or lead > left
