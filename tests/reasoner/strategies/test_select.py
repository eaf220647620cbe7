"""Selection among a client's own candidates: rankings, budgets, replays and refusals."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.protocol.types import EngineUnavailable, InvalidRequest, ModelInfo
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.journal import JobCancelled, MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from tests.reasoner.search.test_stream import Delayed
from tests.reasoner.test_best_so_far import CancelledAt
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from workers.config.settings import Settings

TEXTS = [
    "one \\boxed{1}",
    "two\n\nsteps \\boxed{2}",
    "no answer",
    "again \\boxed{2}",
    "three \\boxed{3}",
    "also \\boxed{2}",
    "  \\boxed{1}",
]
RULES = ["majority", "verifier", "weighted", "tournament", None]
BUDGETS = st.one_of(st.none(), st.integers(1, 1500))


def name_fields(by: str | None = None, seed: int = 1, **more: Any) -> dict[str, Any]:
    strategy = {"name": "select"} | ({} if by is None else {"by": by})
    return {"problem": "how?", "candidates": TEXTS, "strategy": strategy, "seed": seed, "answer": "text"} | more


def spec(by: str | None = None, seed: int = 1, tokens: int | None = None, **more: Any) -> JobSpec:
    return build_spec(name_fields(by, seed, budget={"tokens": tokens}) | more)


async def solve(job: JobSpec, engine: ScriptedEngine | None = None) -> tuple[JobOutcome, MemoryJournal]:
    journal = MemoryJournal()
    return await run_job(job, engine or Delayed(job.seed or 0), journal), journal


def scores(journal: MemoryJournal) -> dict[str, float]:
    return {entry.data["node"]: entry.data["score"] for entry in journal.entries if entry.type == "score"}


# Rankings.


@pytest.mark.parametrize("by", RULES)
@pytest.mark.parametrize("seed", range(4))
async def test_every_candidate_is_ranked_once_the_chosen_one_first_and_no_solution_is_written(
    by: str | None, seed: int
) -> None:
    outcome, journal = await solve(spec(by, seed))
    ranking = outcome.result.ranking
    assert sorted(item.index for item in ranking) == list(range(len(TEXTS)))
    assert ranking[0].node == outcome.result.node
    assert outcome.result.text == TEXTS[ranking[0].index]
    assert outcome.usage.generated == outcome.usage.prompt == 0
    assert [entry.data["answer"] for entry in journal.entries[: len(TEXTS)]] == ["1", "2", None, "2", "3", "2", "1"]


async def test_a_majority_ranks_by_the_share_of_each_answer_without_a_token() -> None:
    outcome, _ = await solve(spec("majority"))
    assert [item.answer for item in outcome.result.ranking] == ["2", "2", "2", "1", "1", "3", None]
    shares = [3 / 7, 3 / 7, 3 / 7, 2 / 7, 2 / 7, 1 / 7]
    assert outcome.result.confidence == pytest.approx(3 / 7)
    assert outcome.result.abstained == 1
    assert [item.share for item in outcome.result.ranking[:6]] == pytest.approx(shares)
    assert outcome.result.ranking[6].share is None
    assert [(vote.answer, vote.count) for vote in outcome.result.votes] == [("2", 3), ("1", 2), ("3", 1)]
    assert outcome.usage.total == 0


@pytest.mark.parametrize("by", ["verifier", None])
async def test_a_verifier_ranks_by_its_scores_and_chooses_among_those_with_an_answer(by: str | None) -> None:
    outcome, journal = await solve(spec(by))
    found = scores(journal)
    assert set(found) == {str(index) for index in range(len(TEXTS))}
    ranking = outcome.result.ranking
    assert {item.node: item.score for item in ranking} == found
    rest = [item.score for item in ranking[1:]]
    assert rest == sorted(rest, key=lambda score: -(score or 0.0))
    assert outcome.result.node == max((node for node in found if node != "2"), key=lambda node: found[node])


async def test_weighted_votes_are_sums_of_scores() -> None:
    outcome, journal = await solve(spec("weighted"))
    found, weights = scores(journal), Counter[str]()
    for entry in journal.entries:
        if entry.type == "node" and entry.data["answer"] is not None:
            weights[entry.data["answer"]] += found[entry.data["node"]]  # type: ignore[assignment]
    assert outcome.result.answer == max(weights, key=lambda answer: weights[answer])
    assert {vote.answer: vote.weight for vote in outcome.result.votes} == pytest.approx(weights)


async def test_a_tournament_ranks_by_strength_also_without_answers() -> None:
    job = spec("tournament", candidates=["an essay", "another essay", "a third one", "  "])
    outcome, _ = await solve(job)
    strengths = [item.strength for item in outcome.result.ranking if item.strength is not None]
    assert strengths == sorted(strengths, reverse=True)
    assert len(strengths) == 3  # the blank one does not take part
    assert outcome.result.ranking[-1].index == 3
    assert sum(item.best or 0.0 for item in outcome.result.ranking) == pytest.approx(1.0, abs=0.01)


async def test_a_verifier_ranks_texts_without_any_answer() -> None:
    outcome, journal = await solve(spec("verifier", candidates=["an essay", "another one"]))
    found = scores(journal)
    assert outcome.result.node == max(found, key=lambda node: found[node])
    assert outcome.result.answer is None


async def test_a_conversation_is_read_as_a_whole_and_its_answer_in_its_last_message() -> None:
    turns = [
        {"role": "user", "content": "how?"},
        {"role": "assistant", "content": "perhaps \\boxed{7}"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "no, \\boxed{8}"},
    ]
    outcome, journal = await solve(spec("majority", candidates=[turns, turns[:2]]))
    texts = [entry.data["text"] for entry in journal.entries if entry.type == "node"]
    assert texts == ["Assistant: perhaps \\boxed{7}\n\nUser: sure?\n\nAssistant: no, \\boxed{8}", "perhaps \\boxed{7}"]
    assert [item.answer for item in outcome.result.ranking] == ["8", "7"]


# Properties of every search.


@given(by=st.sampled_from(RULES), seed=st.integers(0, 1000), tokens=st.integers(1, 1500))
async def test_the_budget_is_kept_to_the_token(by: str | None, seed: int, tokens: int) -> None:
    engine = Delayed(seed)
    outcome = await run_job(spec(by, seed, tokens), engine, MemoryJournal())
    assert engine.most <= tokens
    assert engine.total == outcome.usage.total <= tokens
    assert engine.outstanding == 0
    assert len(outcome.result.ranking) == len(TEXTS)


@given(by=st.sampled_from(RULES), seed=st.integers(0, 1000), tokens=BUDGETS, kept=st.floats(0, 1))
async def test_a_replay_decides_the_same_and_sends_no_request(
    by: str | None, seed: int, tokens: int | None, kept: float
) -> None:
    job, journal, idle = spec(by, seed, tokens), MemoryJournal(), ScriptedEngine()
    first = await run_job(job, Delayed(seed), journal)
    again = await run_job(job, idle, MemoryJournal(journal.entries))
    assert (again.result, again.usage) == (first.result, first.usage)
    assert idle.total == 0
    prefix = journal.entries[: int(kept * len(journal.entries))]
    if prefix and len(prefix) < len(TEXTS):
        return  # the candidates are one batch, which is written as a whole
    resumed = MemoryJournal(prefix)
    await run_job(job, Delayed(seed + 1), resumed)
    assert resumed.entries[: len(prefix)] == prefix


@given(by=st.sampled_from(RULES), seed=st.integers(0, 1000), tokens=BUDGETS, die_after=st.integers(0, 40))
async def test_a_crashed_job_pays_no_token_twice(by: str | None, seed: int, tokens: int | None, die_after: int) -> None:
    job, journal = spec(by, seed, tokens), MemoryJournal()
    dying, fresh = Delayed(seed, die_after=die_after), Delayed(seed + 1)
    with contextlib.suppress(EngineUnavailable):
        await run_job(job, dying, journal)
    outcome = await run_job(job, fresh, journal)
    keys = [entry.key for entry in journal.entries]
    assert len(keys) == len(set(keys))
    assert len(outcome.result.ranking) == len(TEXTS)


@pytest.mark.parametrize("by", RULES)
async def test_a_cancelled_job_has_the_best_candidate_so_far(by: str | None) -> None:
    with pytest.raises(JobCancelled) as raised:
        await run_job(spec(by), ScriptedEngine(), CancelledAt(0))
    result = raised.value.result
    assert result is not None
    assert result.answer == ("2" if by in ("majority", "weighted", None) else "1")  # nothing is scored yet


# Refusals.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"candidates": []}, "at least 1 item"),
        ({"candidates": ["x"] * (MAX_N + 1)}, f"at most {MAX_N} items"),
        ({"candidates": [""]}, "at least 1 character"),
        ({"candidates": [[{"role": "user", "content": "hm"}]]}, "ends with a message of the assistant"),
        ({"candidates": ["x"], "strategy": {"name": "best_of_n"}}, "'best_of_n' writes its own solutions"),
        ({"strategy": {"name": "select"}}, "strategy 'select' needs 'candidates'"),
        ({"candidates": ["x"], "strategy": {"name": "select", "by": "tournament"}}, "a tournament needs two"),
    ],
)
def test_impossible_candidates_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, JobRefused), match=message):
        build_spec({"problem": "how?"} | fields)


def test_candidates_alone_choose_the_strategy() -> None:
    assert build_spec({"problem": "how?", "candidates": ["x"]}).strategy.name == "select"


def test_a_rule_without_its_verifier_is_refused_with_what_would_be_right() -> None:
    with pytest.raises(JobRefused, match="needs a verifier, but 'verifier' is null"):
        spec("weighted", verifier=None)
    with pytest.raises(JobRefused, match="needs a verifier that compares two solutions"):
        spec("tournament", verifier={"kind": "prm"})
    with pytest.raises(JobRefused, match="'pairwise' compares two solutions"):
        spec("verifier", verifier={"kind": "pairwise"})
    spec("majority", verifier=None)


@pytest.mark.parametrize("by", ["verifier", "tournament"])
async def test_a_candidate_beyond_the_verifiers_context_is_refused_by_its_number_before_a_token_is_spent(
    by: str,
) -> None:
    engine, journal = ScriptedEngine(), MemoryJournal()
    with pytest.raises(InvalidRequest, match=r"candidates: 1 \(300 tokens\).*\(256\)") as raised:
        await run_job(spec(by, candidates=["short", "x" * 300]), engine, journal)
    assert raised.value.field == "candidates.1"
    assert engine.total == 0
    assert journal.entries == []
    outcome, _ = await solve(spec("majority", candidates=["short", "x" * 300]))
    assert outcome.usage.total == 0


async def test_a_service_without_a_verifier_ranks_by_votes() -> None:
    class Alone(ScriptedEngine):
        async def models(self) -> list[ModelInfo]:
            return (await super().models())[:1]

    outcome, _ = await solve(spec(), Alone())
    assert outcome.result.answer == "2"


async def test_a_resolved_job_keeps_its_candidates_and_a_tournament_gets_a_verifier_that_compares() -> None:
    resolved = await resolve_job(JobRequest.model_validate(name_fields("tournament")), Settings(), ScriptedEngine())
    assert resolved.verifier is not None
    assert resolved.verifier.kind == "pairwise"
    assert JobSpec.model_validate(resolved.model_dump()) == resolved
