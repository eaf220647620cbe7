"""Branches that a server refuses, and solutions on which a verifier gives no verdict: a job goes on without them."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol.request_checks import ContentFiltered, PromptTooLong, make_refusal
from engine.protocol.types import (
    Completion,
    EngineError,
    Events,
    GenerateRequest,
    InvalidRequest,
    ScoreRequest,
    ScoreResult,
)
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.strategies import WRITING

WORDS = "The response was filtered due to the prompt triggering the content management policy."


class Refusing(ScriptedEngine):
    """Engine that refuses the branches of which ``refuses`` is true, each by itself or, if alone, by an error."""

    def __init__(self, refuses: Any, error: EngineError | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._refuses = refuses
        self._error = error or InvalidRequest(WORDS)

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        refused = [index for index, branch in enumerate(request.branches) if self._refuses(branch.key)]
        if len(refused) == len(request.branches):
            raise self._error
        async for event in super().generate(request, stream=stream):
            assert isinstance(event, Completion)
            if event.index in refused:
                empty = Completion(event.index, (), "", "refused", None, 0.0, event.prompt_tokens, 0)
                yield replace(empty, refusal=make_refusal(self._error))
            else:
                yield event


class Silent(ScriptedEngine):
    """Engine whose judge and reward model say nothing about the nodes of which ``is_unread`` is true."""

    def __init__(self, is_unread: Any, **options: Any) -> None:
        super().__init__(**options)
        self._is_unread = is_unread
        self._num_asked = 0

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        results = []
        for result in await super().score(request):
            if result.values is not None:
                self._num_asked += 1
                if self._is_unread(self._num_asked):
                    result = ScoreResult(result.index, (), result.computed_tokens, result.cached_tokens, unread="Hm?")
            results.append(result)
        return results


async def solve(
    engine: ScriptedEngine, strategy: dict[str, Any], journal: MemoryJournal | None = None, **fields: Any
) -> JobOutcome:
    body = {"problem": "how?", "seed": 3, "strategy": strategy, "budget": {"tokens": 4000}} | fields
    return await run_job(build_spec(body), engine, journal or MemoryJournal())


def verifier_of(name: str) -> dict[str, Any] | None:
    return {"kind": "pairwise", "max_tokens": 0} if name == "tournament" else {"kind": "prm"}


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("seed", range(3))
async def test_every_strategy_goes_on_without_the_branches_that_are_refused(name: str, seed: int) -> None:
    engine = Refusing(lambda key: (key >> 7) % 3 == 0)
    journal = MemoryJournal()
    fields = {"verifier": verifier_of(name), "seed": seed}
    if name == "greedy" or (name == "budget_forcing" and seed == 0):
        with contextlib.suppress(InvalidRequest):  # it has one branch
            await solve(engine, {"name": name}, journal, **fields)
        return
    outcome = await solve(engine, {"name": name}, journal, **fields)
    again = await solve(ScriptedEngine(die_after=0), {"name": name}, MemoryJournal(journal.entries), **fields)
    assert (again.result, again.status) == (outcome.result, outcome.status)
    refused = [entry.data for entry in journal.entries if entry.data.get("reason") == "refused"]
    assert all(data["refusal"]["message"] == WORDS for data in refused)


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize(
    "error", [InvalidRequest(WORDS, "messages"), EngineError(WORDS), PromptTooLong(WORDS), ContentFiltered(WORDS)]
)
async def test_without_any_finished_branch_a_job_fails_with_the_servers_words(name: str, error: EngineError) -> None:
    engine = Refusing(lambda _: True, error)
    journal = MemoryJournal()
    with pytest.raises(EngineError, match="content management policy") as caught:
        await solve(engine, {"name": name}, journal, verifier=verifier_of(name))
    assert make_refusal(caught.value) == make_refusal(error)
    with pytest.raises(type(error), match="content management policy"):
        await solve(
            ScriptedEngine(die_after=0), {"name": name}, MemoryJournal(journal.entries), verifier=verifier_of(name)
        )


async def test_a_vote_is_held_by_what_was_paid_for() -> None:
    journal = MemoryJournal()
    outcome = await solve(Refusing(lambda key: key % 2 == 0), {"name": "self_consistency", "n": 12}, journal)
    nodes = {entry.data["node"]: entry.data for entry in journal.entries if entry.type == "node"}
    reasons = [data["reason"] for data in nodes.values()]
    assert 0 < reasons.count("refused") < 12
    assert len(reasons) == 12
    assert sum(vote.count for vote in outcome.result.votes) <= 12 - reasons.count("refused")
    assert outcome.result.answer is not None
    assert outcome.usage.generated == sum(data["tokens"] for data in nodes.values())


# Verdicts.


@pytest.mark.parametrize("name", [name for name in WRITING if name != "tournament"])
@pytest.mark.parametrize("kind", ["prm", "judge"])
async def test_every_strategy_ends_where_the_verifier_says_nothing(name: str, kind: str) -> None:
    journal = MemoryJournal()
    fields = {"verifier": {"kind": kind}, "budget": {"tokens": 6000}}
    outcome = await solve(Silent(lambda _: True), {"name": name}, journal, **fields)
    asked = [entry for entry in journal.entries if entry.type == "score"]
    assert all(entry.data["score"] is None for entry in asked)
    assert outcome.usage.unscored == len(asked)
    if asked:
        assert outcome.result.note == (
            f"the verifier gave no verdict that can be read on {len(asked)} of {len(asked)} solutions: "
            "it has ranked nothing"
        )
    again = await solve(ScriptedEngine(die_after=0), {"name": name}, MemoryJournal(journal.entries), **fields)
    assert (again.result, again.usage.unscored) == (outcome.result, len(asked))


@pytest.mark.parametrize("name", ["best_of_n", "weighted_vote", "auto"])
@pytest.mark.parametrize("seed", range(5))
async def test_a_solution_without_a_verdict_is_never_better_than_one_with_a_score(name: str, seed: int) -> None:
    journal = MemoryJournal()
    outcome = await solve(Silent(lambda count: count % 2), {"name": name, "n": 12}, journal, seed=seed)
    scores = {entry.data["node"]: entry.data["score"] for entry in journal.entries if entry.type == "score"}
    assert None in scores.values()
    assert outcome.result.node is not None
    if name == "best_of_n":
        assert scores[outcome.result.node] == max(score for score in scores.values() if score is not None)
    assert "no verdict that can be read on" in (outcome.result.note or "")


async def test_a_missing_verdict_is_in_the_tree_with_its_words_and_in_the_log_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = MemoryJournal()
    with caplog.at_level(logging.WARNING, "reasoner.search"):
        await solve(Silent(lambda count: count == 1), {"name": "best_of_n", "n": 3}, journal)
    [missing] = [entry.data for entry in journal.entries if entry.type == "score" and entry.data["score"] is None]
    assert missing["verdicts"] == [[{"score": None, "votes": [None], "critiques": ["Hm?"]}]]
    [message] = [record.getMessage() for record in caplog.records]
    assert f"no verdict on {missing['node']} " in message
    assert "Hm?" not in message


async def test_one_text_that_the_verifiers_server_refuses_has_no_score() -> None:
    class Filtering(ScriptedEngine):
        async def score(self, request: ScoreRequest) -> list[ScoreResult]:
            if any(sum(map(len, item.parts)) % 3 == 0 for item in request.items):
                raise InvalidRequest(WORDS)
            return await super().score(request)

    journal = MemoryJournal()
    outcome = await solve(Filtering(), {"name": "best_of_n", "n": 12}, journal)
    scores = [entry.data for entry in journal.entries if entry.type == "score"]
    missing = [data for data in scores if data["score"] is None]
    assert 0 < len(missing) < len(scores)
    assert all(data["verdicts"][0][0]["critiques"] == [WORDS] for data in missing)
    assert outcome.result.confidence is not None


async def test_a_verifier_that_is_not_served_fails_the_job() -> None:
    class Missing(ScriptedEngine):
        async def score(self, request: ScoreRequest) -> list[ScoreResult]:
            raise InvalidRequest("no such model", "model")

    with pytest.raises(InvalidRequest, match="no such model"):
        await solve(Missing(), {"name": "best_of_n", "n": 3})
