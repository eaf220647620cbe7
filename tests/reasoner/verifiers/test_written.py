"""Verifiers that write: scores against closed forms, position bias, nonsense, and the budget."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    GenerateRequest,
    InvalidRequest,
    TokenLogprob,
)
from reasoner.jobs.journal import Entry, JobCancelled, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from tests.reasoner.crashes import check_budget_and_replay
from tests.scripted import ScriptedEngine, is_verdict, is_written_verdict
from tests.specs import build_spec

GENERATIVE: dict[str, Any] = {"kind": "generative", "votes": 3, "max_tokens": 10}
SCORED = ("best_of_n", "weighted_vote", "beam", "best_first")


class PlantedJudge(ScriptedEngine):
    """An engine whose verdicts have fixed probabilities of labels, each of one character."""

    def __init__(self, labels: Mapping[str, float]) -> None:
        super().__init__(context=2000)
        self._labels = tuple((50 + ord(label) % 50, math.log(share)) for label, share in labels.items())

    def _logprobs(self, request: GenerateRequest, branch: Branch, ids: list[int]) -> tuple[TokenLogprob, ...] | None:
        if not request.sampling.ignore_eos:
            return super()._logprobs(request, branch, ids)
        return (TokenLogprob(0, -30.0, self._labels),)  # a sampled token that is no label


def job(strategy: str, seed: int = 1, tokens: int | None = None, **more: Any) -> JobSpec:
    chosen = {"name": strategy, "n": 6, **more.pop("params", {})}
    return build_spec({"problem": "how?", "seed": seed, "strategy": chosen, "budget": {"tokens": tokens}} | more)


async def find_entries(spec: JobSpec, engine: ScriptedEngine, kind: str) -> list[Entry]:
    journal = MemoryJournal()
    await run_job(spec, engine, journal)
    return [entry for entry in journal.entries if entry.type == kind]


@pytest.mark.parametrize("schedule", ["knockout", "swiss", "pivot"])
async def test_a_judge_that_always_names_the_first_gives_no_solution_anything(schedule: str) -> None:
    spec = job("tournament", params={"schedule": schedule})
    matches = await find_entries(spec, PlantedJudge({"A": 0.9, "B": 0.05}), "compare")
    assert matches
    assert {entry.data["score"] for entry in matches} == {0.5}
    biased = [verdict["score"] for entry in matches for verdict in entry.data["verdicts"]]
    assert biased == pytest.approx([0.9 / 0.95] * len(biased))


async def test_a_judge_that_answers_nonsense_gives_no_score() -> None:
    nonsense = {"Q": 0.9, "Y": 0.01, "A": 0.01}
    scores = await find_entries(job("best_of_n", verifier=GENERATIVE), PlantedJudge(nonsense), "score")
    assert scores
    assert {entry.data["score"] for entry in scores} == {None}
    journal = MemoryJournal()
    outcome = await run_job(job("tournament"), PlantedJudge(nonsense), journal)
    [decision] = [entry.data for entry in journal.entries if "without_verdict" in str(entry.data)]
    assert "'matches': 0" in str(decision)
    assert outcome.result.confidence is None


class Writes(PlantedJudge):
    """A judge that begins its verdicts with marks, not with a label."""

    def __init__(self, text: str) -> None:
        super().__init__({"*": 0.99, "Y": 0.004})
        self._written = text

    def _complete(self, request: GenerateRequest, index: int) -> Completion:
        completion = super()._complete(request, index)
        return replace(completion, text=self._written) if is_written_verdict(request) else completion


@pytest.mark.parametrize("max_tokens", [0, 10])
@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("**Y**", 1.0),
        (" `N`", 0.0),
        ("\n- Y, since all", 1.0),
        ("\\boxed{N}", 0.0),
        ("Y or N", None),
        ("**Maybe**", None),
        ("", None),
    ],
)
async def test_a_label_behind_marks_is_a_vote(text: str, score: float | None, max_tokens: int) -> None:
    verifier = GENERATIVE | {"max_tokens": max_tokens, "votes": 3 if max_tokens else 1}
    engine = Writes(text)
    entries = await find_entries(job("best_of_n", tokens=20_000, verifier=verifier), engine, "score")
    assert {entry.data["score"] for entry in entries} == {score}
    assert engine.most <= 20_000
    assert engine.outstanding == 0


async def test_a_pair_is_judged_by_a_label_behind_marks() -> None:
    matches = await find_entries(job("tournament"), Writes("**A**"), "compare")
    assert matches
    assert {entry.data["score"] for entry in matches} == {0.5}  # the first, whichever it is


async def test_the_score_is_the_mean_of_the_votes_and_a_vote_the_probability_of_yes() -> None:
    spec = job("best_of_n", verifier=GENERATIVE)
    [first, *_] = await find_entries(spec, PlantedJudge({"Y": 0.6, "N": 0.2}), "score")
    assert first.data["score"] == pytest.approx(0.75)
    verdicts = [entry.data for entry in await find_entries(spec, ScriptedEngine(), "score") if entry.data["computed"]]
    assert verdicts
    for data in verdicts:
        [[verdict]] = data["verdicts"]
        assert len(verdict["votes"]) == len(verdict["critiques"]) == 3
        assert len(set(verdict["votes"])) > 1
        assert data["score"] == pytest.approx(math.fsum(verdict["votes"]) / 3)


async def test_a_scale_gives_the_expected_label() -> None:
    verifier = GENERATIVE | {"labels": "1-5"}
    shares = {"1": 0.1, "2": 0.1, "3": 0.2, "4": 0.2, "5": 0.3}
    [first, *_] = await find_entries(job("best_of_n", verifier=verifier), PlantedJudge(shares), "score")
    expected = sum(share * (int(label) - 1) / 4 for label, share in shares.items()) / sum(shares.values())
    assert first.data["score"] == pytest.approx(expected)


async def test_criteria_are_scored_one_by_one_and_weighted() -> None:
    rubric = [{"name": "right", "weight": 3}, {"name": "clear", "description": "easy to follow"}]
    template = "{{ question }} {{ solution }} {{ criterion }}"
    verifier = GENERATIVE | {"rubric": rubric, "template": template}
    entries = await find_entries(job("best_of_n", verifier=verifier), ScriptedEngine(), "score")
    asked = [entry.data for entry in entries if entry.data["computed"]]
    assert asked
    for data in asked:
        right, clear = data["criteria"]["right"], data["criteria"]["clear"]
        assert right != clear
        assert data["score"] == pytest.approx((3 * right + clear) / 4)


async def test_labels_that_are_not_single_tokens_are_refused_by_name() -> None:
    verifier = GENERATIVE | {"labels": {"good": 1.0, "bad": 0.0}}
    with pytest.raises(InvalidRequest, match=r"does not write good, bad as one token each") as refused:
        await run_job(job("best_of_n", verifier=verifier), ScriptedEngine(), MemoryJournal())
    assert refused.value.field == "verifier.labels"


@given(
    strategy=st.sampled_from(SCORED),
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 6000),
    by_step=st.booleans(),
    die_after=st.integers(0, 60),
)
async def test_critiques_keep_the_budget_and_a_resumed_job_replays_them(
    strategy: str, seed: int, tokens: int, by_step: bool, die_after: int
) -> None:
    spec = job(strategy, seed, tokens, verifier=GENERATIVE | {"by_step": by_step})
    await check_budget_and_replay(spec, partial(ScriptedEngine, held=0.5), order=seed, die_after=die_after)


class Silent(ScriptedEngine):
    """An engine that never finishes a critique."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        if is_verdict(request):
            self.asked.set()
            await asyncio.Event().wait()
        async for item in super().generate(request, stream=stream):
            yield item


@pytest.mark.parametrize("spec", [job("best_of_n", verifier=GENERATIVE), job("tournament")], ids=["scores", "pairs"])
async def test_a_job_is_cancelled_while_a_critique_is_written(spec: JobSpec) -> None:
    engine, cancelled = Silent(), asyncio.Event()
    running = asyncio.create_task(run_job(spec, engine, MemoryJournal(), cancelled=cancelled))
    await engine.asked.wait()
    cancelled.set()
    with pytest.raises(JobCancelled) as end:
        await running
    assert end.value.result is not None
    assert end.value.result.text
