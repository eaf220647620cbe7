"""Tables of families: what two families would teach each other wrongly, and what a job does that names none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reasoner.admission.refusal import JobRefused
from reasoner.confidence.calibration import Calibration, Check
from reasoner.evaluation.calibrate.families import check, fit_families, fit_table, name_families
from reasoner.evaluation.calibrate.fitting import TREES, Measured, Path, choose_from_pool, list_menu
from reasoner.evaluation.calibrate.trials import Candidate, Trial, get_stage_name
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import run_job
from tests.reasoner.strategies.test_auto import document, plan
from tests.scripted import ScriptedEngine
from tests.seeds import shift
from tests.specs import build_spec

WORTH = 300.0


def candidate(answer: str | None, *, right: bool = False, score: float | None = None) -> Candidate:
    return Candidate(answer=answer, score=score, right=right, generated=10, verified=0)


def draw(suite: str, count: int, seed: int, *, trusts_votes: bool) -> list[Measured]:
    """Return problems of two answers: the frequent one is right, or else the one that scores high though it is rare."""
    rng = random.Random(shift(seed))
    problems = []
    for number in range(count):
        pool = []
        for _ in range(16):
            is_frequent = rng.random() < 0.75
            score = rng.uniform(0.6, 0.9) if not is_frequent and not trusts_votes else rng.uniform(0.1, 0.4)
            pool.append(candidate("a" if is_frequent else "b", right=is_frequent is trusts_votes, score=score))
        stages = {
            get_stage_name(stage): Trial(
                suite=suite, problem=str(number), stage=get_stage_name(stage), candidates=pool[:2], tokens=400
            )
            for stage in TREES
        }
        problems.append(Measured(suite, tuple(pool), head=20.0, each=0.0, stages=stages))
    return problems


def test_each_family_is_level_with_its_whole_pool_for_half_of_the_tokens() -> None:
    problems = [*draw("votes", 60, 1, trusts_votes=True), *draw("scores", 60, 2, trusts_votes=False)]
    menu = list_menu(TREES)
    names = {"votes": "votes", "scores": "scores"}
    families = fit_families(problems, menu, names, worth=WORTH, common=fit_table(problems, menu, WORTH))
    for family in families:
        assert family.check.accuracy >= family.check.reference
        assert family.check.tokens <= 0.5 * family.check.reference_tokens
    votes, scores = families
    assert scores.curve.score > votes.curve.score
    assert scores.curve.votes < votes.curve.votes


def test_where_no_stages_are_level_the_pool_is_sampled_whole() -> None:
    """The right answer, one sample of sixteen, is only known by its score, which differs from all others' by little."""
    problems = []
    for number in range(40):
        place = number % 16
        pool = [candidate(str(index), right=index == place, score=0.5 + 0.01 * (index == place)) for index in range(16)]
        problems.append(Measured("hidden", tuple(pool), head=0.0, each=0.0, stages={}))
    fitted = fit_table(problems, list_menu(()), WORTH)
    told = check(fitted.held_out)
    assert (told.accuracy, told.tokens) == (told.reference, told.reference_tokens)


def test_the_reference_is_the_best_scored_sample_and_the_majority_without_scores() -> None:
    scored = [
        candidate("a"),
        candidate("b", right=True, score=0.4),
        candidate("c", score=0.3),
        candidate("c", score=0.2),
    ]
    assert choose_from_pool(Measured("s", tuple(scored), 5.0, 0.0, {})) == Path(True, 45.0)
    voted = [candidate(None), candidate("b"), candidate("c", right=True), candidate("c", right=True)]
    assert choose_from_pool(Measured("s", tuple(voted), 0.0, 0.0, {})).right
    assert not choose_from_pool(Measured("s", (candidate(None),), 0.0, 0.0, {})).right


def test_a_check_is_behind_by_more_than_one_standard_error() -> None:
    told = {"problems": 100, "reference": 0.5, "error": 0.02, "tokens": 1.0, "reference_tokens": 1.0}
    assert Check(accuracy=0.479, **told).is_behind
    assert not Check(accuracy=0.481, **told).is_behind


def test_a_family_is_named_by_its_task_or_file_and_by_its_parameters_where_two_share_it() -> None:
    gym = "reasoning-gym:gcd?max_value="
    assert name_families(["countdown", f"{gym}30&shots=4", "/data/gsm8k-test.jsonl", "reasoning-gym:aiw?shots=4"]) == {
        "countdown": "countdown",
        f"{gym}30&shots=4": "gcd",
        "/data/gsm8k-test.jsonl": "gsm8k-test",
        "reasoning-gym:aiw?shots=4": "aiw",
    }
    assert list(name_families([f"{gym}30", f"{gym}100"]).values()) == [
        "reasoning-gym-gcd-max_value=30",
        "reasoning-gym-gcd-max_value=100",
    ]


def build_table(*accuracies: float) -> Calibration:
    """Return a table for the scripted engine with a family for each accuracy that the common part has on it."""
    told = {"problems": 100, "reference": 0.5, "error": 0.02, "tokens": 1.0, "reference_tokens": 1.0}
    common = document()
    bins = [{"below": 1.0, "stages": [], "problems": 1, "accuracy": 0.5, "tokens": 1.0}]
    families = [
        {"name": f"f{index}", "curve": common["curve"], "confidence": 0.7, "bins": bins}
        | {"check": told | {"accuracy": 0.5}, "common": told | {"accuracy": accuracy}}
        for index, accuracy in enumerate(accuracies)
    ]
    return Calibration.model_validate(common | {"families": families})


async def ask(table: Calibration | None, **strategy: Any) -> MemoryJournal:
    journal = MemoryJournal()
    spec = build_spec({"problem": "how?", "strategy": {"name": "auto", "n": 4} | strategy, "seed": 1, "answer": "text"})
    await run_job(spec, ScriptedEngine(), journal, calibration=table)
    return journal


async def test_a_job_reads_the_part_of_the_family_that_it_names_and_else_what_is_common() -> None:
    table = build_table(0.5, 0.5)
    assert plan(await ask(table, family="f1"))["stages"] == []
    assert len(plan(await ask(table))["stages"]) == len(table.bins[0].stages)


async def test_a_job_without_a_family_gets_no_table_that_is_behind_on_one_and_is_told_so() -> None:
    decided = plan(await ask(build_table(0.5, 0.4)))
    assert not decided["calibrated"]
    assert "f1: 0.400 beside 0.500" in decided["uncalibrated"]
    assert plan(await ask(build_table(0.5, 0.4), family="f1"))["calibrated"]


async def test_the_table_of_one_family_holds_for_jobs_that_name_none() -> None:
    decided = plan(await ask(build_table(0.4)))
    assert (decided["calibrated"], decided["stages"]) == (True, [])


@pytest.mark.parametrize(("table", "told"), [(build_table(0.5, 0.5), "'f0', 'f1'"), (None, "no table with families")])
async def test_an_unknown_family_is_refused_with_those_that_there_are(table: Calibration | None, told: str) -> None:
    with pytest.raises(JobRefused, match="unknown family 'f9'") as refused:
        await ask(table, family="f9")
    assert refused.value.field == "strategy.family"
    assert told in refused.value.message


async def test_a_search_stops_where_a_better_answer_is_unlikely_to_be_new() -> None:
    """The scripted engine's answers differ, so that only a high least gain stops it after the probe."""
    voting = {"name": "self_consistency", "n": 2}
    bins = [{"below": 1.0, "stages": [voting, voting, voting], "problems": 1, "accuracy": 0.5, "tokens": 1.0}]
    sizes = []
    for least_gain in (0.0, 1.0):
        table = Calibration.model_validate(document(bins=bins, least_gain=least_gain, probe=2))
        journal = await ask(table, n=16)
        sizes.append(sum(entry.type == "node" and entry.data["parent"] == "" for entry in journal.entries))
    assert sizes == [8, 2]


def test_the_order_of_a_pool_is_chance_and_each_problem_counts_once_in_an_error() -> None:
    problems = draw("votes", 20, 5, trusts_votes=True)
    fitted = fit_table(problems, list_menu(TREES), WORTH)
    told = check(fitted.held_out)
    assert told.problems == 20
    assert len(fitted.held_out) == 20 * 4
