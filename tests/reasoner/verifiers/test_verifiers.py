"""Verifiers of every kind in a search: validation, budget, journal and scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.protocol.types import EngineError, InvalidRequest, ModelInfo, ScoreRequest, ScoreResult, TokenizeRequest
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, open_search, run_job
from reasoner.search.search import Search
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

JUDGE = {"kind": "judge"}
OUTCOME = {"kind": "outcome"}


def spec(strategy: str, verifier: dict[str, Any], seed: int = 0, tokens: int | None = None) -> JobSpec:
    return build_spec(
        {
            "problem": "how?",
            "seed": seed,
            "strategy": {"name": strategy, "n": 8},
            "budget": {"tokens": tokens},
            "verifier": verifier,
        }
    )


async def run(job: JobSpec, engine: ScriptedEngine, journal: MemoryJournal | None = None) -> JobOutcome:
    return await run_job(job, engine, journal or MemoryJournal())


class Watching(ScriptedEngine):
    """Engine that records its score requests and also serves an outcome reward model with two labels."""

    async def models(self) -> list[ModelInfo]:
        architecture = "LlamaForSequenceClassification"
        return [*await super().models(), ModelInfo("orm", "classify", 256, 100, 1000, architecture=architecture)]

    def __init__(self, *, order: int = 0) -> None:
        super().__init__(order=order)
        self.asked: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        self.asked.append(request)
        return await super().score(request)


def test_a_verifier_without_a_kind_is_a_process_reward_model() -> None:
    plain = build_spec({"problem": "?", "verifier": {"model": "prm", "aggregation": "min"}})
    named = build_spec({"problem": "?", "verifier": {"kind": "prm", "model": "prm", "aggregation": "min"}})
    assert plain == named
    assert build_spec({"problem": "?"}).verifier.kind == "prm"
    for job in (spec("beam", {"model": "prm"}), spec("beam", JUDGE)):
        assert JobSpec.model_validate(job.model_dump()) == job


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ({"kind": "oracle"}, "unknown kind of verifier; use one of prm, judge, outcome"),
        ({"kind": ["prm"]}, "unknown kind of verifier"),
        ({"kind": "judge", "aggregation": "median"}, "'last', 'min', 'prod', 'mean' or 'max'"),
        ({"kind": "judge", "template": "?"}, "Extra inputs are not permitted"),
        ({"url": "http://169.254.169.254/"}, "Extra inputs are not permitted"),
        ("judge", "unknown kind of verifier|valid dictionary"),
    ],
)
def test_an_unknown_verifier_is_refused(verifier: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_spec({"problem": "?", "verifier": verifier})


@given(
    asked=st.sampled_from([("best_of_n", JUDGE), ("beam", JUDGE), ("best_of_n", OUTCOME), ("weighted_vote", OUTCOME)]),
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 20_000),
    order=st.integers(0, 1000),
)
async def test_every_model_keeps_the_budget_to_the_token(
    asked: tuple[str, dict[str, Any]], seed: int, tokens: int, order: int
) -> None:
    engine = Watching(order=order)
    outcome = await run(spec(*asked, seed, tokens), engine)
    assert engine.most <= tokens
    assert engine.total == outcome.usage.total <= tokens
    assert engine.outstanding == 0


async def test_a_judge_scores_only_finished_steps_by_yes_against_no() -> None:
    engine, journal = Watching(), MemoryJournal()
    outcome = await run(spec("beam", JUDGE), engine, journal)
    nodes = {entry.data["node"]: entry.data for entry in journal.entries if entry.type == "node"}
    scored = {entry.data["node"]: entry.data for entry in journal.entries if entry.type == "score"}
    judged = {name for name, data in nodes.items() if data["text"].strip() and data["reason"] in ("step", "stop")}
    judged |= {name for name, data in nodes.items() if data["reason"] == "answer"}
    assert scored.keys() == judged < nodes.keys()
    assert all(len(data["scores"]) == 1 and 0 < data["score"] < 1 for data in scored.values())
    verdicts = await engine.tokenize(TokenizeRequest("policy", "YN"))  # a token for each character
    assert {(request.model, request.token_ids) for request in engine.asked} == {("policy", verdicts)}
    assert outcome.usage.verifier_computed == sum(entry.spend.verifier_computed for entry in journal.entries) > 0


async def test_an_outcome_model_scores_finished_solutions_once_and_no_steps() -> None:
    engine, journal = Watching(), MemoryJournal()
    outcome = await run(spec("best_of_n", OUTCOME), engine, journal)
    nodes = {entry.data["node"]: entry.data for entry in journal.entries if entry.type == "node"}
    scored = {entry.data["node"]: entry.data for entry in journal.entries if entry.type == "score"}
    finished = {name for name, data in nodes.items() if data["reason"] == "stop" and data["answer"] is not None}
    assert scored.keys() == finished
    assert all(data["scores"] == [] and 0 < data["score"] < 1 for data in scored.values())
    assert {request.model for request in engine.asked} == {"orm"}
    assert outcome.result.confidence == max(data["score"] for data in scored.values())


async def test_a_causal_model_in_a_verifier_format_scores_and_does_not_generate() -> None:
    class Causal(Watching):
        async def models(self) -> list[ModelInfo]:
            named = {"reasoner_prm": "rlhflow"}
            return [(await super().models())[0], ModelInfo("judge", "generate", 256, 100, 1000, named)]

    engine = Causal()
    await run(spec("best_of_n", {}), engine)
    verdicts = await engine.tokenize(TokenizeRequest("judge", "+-"))
    assert {(request.model, request.token_ids) for request in engine.asked} == {("judge", verdicts)}
    assert {request.model for request in engine.requests} == {"policy"}


@settings(max_examples=20, deadline=None)
@given(
    asked=st.sampled_from([("best_of_n", JUDGE), ("beam", JUDGE), ("best_of_n", OUTCOME)]), seed=st.integers(0, 1000)
)
async def test_a_replay_calls_no_model_again(asked: tuple[str, dict[str, Any]], seed: int) -> None:
    job, journal = spec(*asked, seed), MemoryJournal()
    first = await run(job, Watching(), journal)
    idle = Watching()
    again = await run(job, idle, MemoryJournal(journal.entries))
    assert (again.result, again.usage, idle.asked) == (first.result, first.usage, [])


async def test_a_judge_that_is_no_language_model_is_refused_with_the_valid_models() -> None:
    with pytest.raises(InvalidRequest, match=r"verifier.model 'prm' is not served; served are policy"):
        await run(spec("beam", JUDGE | {"model": "prm"}), ScriptedEngine())


async def test_a_judge_whose_yes_and_no_share_their_first_token_is_refused() -> None:
    class Mute(ScriptedEngine):
        async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
            return (7,) * len(await super().tokenize(request))

    with pytest.raises(EngineError, match="'policy' cannot judge"):
        await run(spec("beam", JUDGE), Mute())


class Narrow(Watching):
    """Engine whose verifiers have a context of ``holds`` tokens."""

    def __init__(self, holds: int) -> None:
        super().__init__()
        self._holds = holds

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        for item in request.items:
            if sum(max(1, len(part) // 4) if isinstance(part, str) else len(part) for part in item.parts) > self._holds:
                raise InvalidRequest("an item has too many tokens", "items.parts")
        return await super().score(request)


async def test_a_solution_longer_than_the_verifiers_context_keeps_its_score_and_the_job_succeeds() -> None:
    narrow = MemoryJournal()
    outcome = await run(spec("beam", {}), Narrow(14), narrow)
    assert outcome.status in ("completed", "incomplete")
    scored = {entry.data["node"]: entry.data for entry in narrow.entries if entry.type == "score"}
    outgrown = [data for data in scored.values() if not data["scores"]]
    assert outgrown
    assert any(data["scores"] for data in scored.values())
    for data in outgrown:
        above = data["node"].rpartition(".")[0]
        assert data["score"] == (scored[above]["score"] if above else 0.0)
        assert data["computed"] == 0
    idle = Narrow(0)
    again = await run(spec("beam", {}), idle, MemoryJournal(narrow.entries))
    assert (again.result, idle.asked) == (outcome.result, [])


async def test_a_question_longer_than_the_verifiers_context_is_refused_with_both_lengths() -> None:
    class Small(ScriptedEngine):
        async def models(self) -> list[ModelInfo]:
            return [replace(info, context=4) if info.id == "prm" else info for info in await super().models()]

    with pytest.raises(InvalidRequest, match=r"4 tokens, and the context of verifier 'prm' holds 4"):
        await run(spec("beam", {}), Small())


@pytest.mark.parametrize("verifier", [{}, JUDGE])
async def test_a_node_and_its_parent_in_one_call_are_scored_as_in_two(verifier: dict[str, Any]) -> None:
    found: list[list[tuple[float, ...]]] = []

    async def grow(search: Search, *, together: bool) -> None:
        line = [search.root]
        while len(line) < 4:
            async for nodes in search.expand([line[-1]], 1):
                line += nodes
        line = [node for node in line[1:] if node.text.strip()]
        if together:
            await search.score(line[::-1])
        else:
            for node in line:
                await search.score([node])
        found.append([node.scores for node in line])

    for together in (True, False):
        engine, job = ScriptedEngine(), spec("beam", verifier, seed=8)
        async with open_search(job, engine, MemoryJournal()) as search:
            await grow(search, together=together)
    assert found[0] == found[1]
    assert len(found[0][-1]) == len(found[0]) > 1
