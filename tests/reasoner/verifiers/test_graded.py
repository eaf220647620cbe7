"""The graded verifier: closed forms, the other way round, prompts that a cache holds, and the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters.judge import JUDGE_NOTE
from engine.protocol.types import (
    InvalidRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
    Token,
)
from prm.scorers.next_turn import count_common
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from tests.reasoner.crashes import check_budget_and_replay
from tests.scripted import EOS, THOUGHT, ScriptedEngine
from tests.specs import build_spec

GRADES = "ABCDEFGHIJKLMNOPQRST"
SCORED = ("best_of_n", "weighted_vote", "beam", "dvts", "best_first", "particle", "tournament")
CRITERIA = [{"name": "right", "weight": 3}, {"name": "clear", "description": "easy to follow"}]


def encode(text: str) -> tuple[int, ...]:
    return tuple(50 + ord(char) % 50 for char in text)


class Grader(ScriptedEngine):
    """An engine that records its score requests. ``weigh`` gives the log-probability of a token behind a prompt."""

    def __init__(self, weigh: Callable[[Sequence[Token], Token], float] | None = None, **more: Any) -> None:
        super().__init__(**{"context": 3000} | more)
        self._weigh = weigh
        self.scored: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        self.scored.append(request)
        results = await super().score(request)
        if self._weigh is None:
            return results
        planted = []
        for item, result in zip(request.items, results, strict=True):
            [part] = item.parts
            assert not isinstance(part, str)
            values = (tuple(self._weigh(part, token) for token in request.token_ids),)
            planted.append(result if result.values is None else replace(result, values=values))
        return planted

    @property
    def prompts(self) -> list[tuple[Token, ...]]:
        return [part for request in self.scored for item in request.items for part in item.parts]  # type: ignore[misc]


def job(strategy: str = "best_of_n", tokens: int | None = None, seed: int = 1, **verifier: Any) -> JobSpec:
    chosen = {"name": strategy, "n": 6}
    graded = {"kind": "graded"} | verifier
    return build_spec(
        {"problem": "how?", "seed": seed, "strategy": chosen, "budget": {"tokens": tokens}, "verifier": graded}
    )


async def find_entries(spec: JobSpec, engine: ScriptedEngine, kind: str = "score") -> list[Entry]:
    journal = MemoryJournal()
    await run_job(spec, engine, journal)
    found = [entry for entry in journal.entries if entry.type == kind]
    assert found
    return found


async def test_the_score_is_the_expectation_over_the_grades() -> None:
    shares = {encode(letter)[0]: (index + 1) / 250 for index, letter in enumerate(GRADES)}
    engine = Grader(lambda prompt, token: math.log(shares[token]))  # type: ignore[index]
    expected = sum(share * index / 19 for index, share in enumerate(shares.values())) / sum(shares.values())
    for entry in await find_entries(job(), engine):
        assert entry.data["score"] == pytest.approx(expected)


async def test_a_model_that_prefers_a_letter_gives_nothing_once_it_is_asked_both_ways_round() -> None:
    first = encode("C")[0]
    engine = Grader(lambda prompt, token: math.log(0.9) if token == first else -30.0)
    for entry in await find_entries(job(repeats=2), engine):
        assert entry.data["grades"] == [pytest.approx(2 / 19), pytest.approx(17 / 19)]
        assert entry.data["score"] == pytest.approx(0.5)
    for entry in await find_entries(job("tournament", repeats=1), engine, "compare"):
        assert entry.data["score"] == pytest.approx(0.5)


async def test_criteria_are_questions_of_their_own_with_weights() -> None:
    for entry in await find_entries(job(criteria=CRITERIA, repeats=2), Grader()):
        if not entry.data["computed"]:
            continue
        grades, criteria = entry.data["grades"], entry.data["criteria"]
        assert len(set(grades)) == 4
        assert criteria == {"right": pytest.approx(sum(grades[:2]) / 2), "clear": pytest.approx(sum(grades[2:]) / 2)}
        assert entry.data["score"] == pytest.approx((3 * criteria["right"] + criteria["clear"]) / 4)


async def test_unlikely_grades_are_no_score() -> None:
    journal = MemoryJournal()
    outcome = await run_job(job(), Grader(lambda prompt, token: math.log(0.002)), journal)
    scores = [entry for entry in journal.entries if entry.type == "score"]
    assert {entry.data["score"] for entry in scores} == {None}
    assert "unlikely" in scores[0].data["unread"][0]
    assert outcome.usage.unscored == len(scores)


async def test_grades_that_are_no_single_tokens_are_refused_with_those_that_are() -> None:
    with pytest.raises(
        InvalidRequest, match=r"does not write good, 10 as one token each.* those that it does are 1, 2"
    ):
        await run_job(job(grades={"1": 0.0, "2": 0.5, "good": 0.9, "10": 1.0}), Grader(), MemoryJournal())


async def test_in_place_a_question_follows_the_branch_itself_which_goes_on_without_it() -> None:
    engine, journal = Grader(), MemoryJournal()
    await run_job(job("beam"), engine, journal)
    nodes = {entry.data["node"]: entry.data for entry in journal.entries if entry.type == "node"}
    branches = {find_prefix(nodes, name) for name in nodes}
    asked = encode("\n\nThe solution is unfinished. Grade it so far from A (wrong) to T (right).\nGrade: ")
    ended = encode("\n\nGrade this solution from A (wrong) to T (right).\nGrade: ")
    assert engine.prompts
    for prompt in engine.prompts:
        tail = asked if prompt[-len(asked) :] == asked else ended
        assert prompt[-len(tail) :] == tail
        branch = prompt[: -len(tail)]
        assert branch in branches or (*branch, EOS) in branches
    assert not any(asked[:20] == request.prompt[at : at + 20] for request in engine.requests for at in range(400))


def find_prefix(nodes: dict[str, dict[str, Any]], name: str) -> tuple[int, ...]:
    """Return the tokens of the question and of a node's branch."""
    if not name:
        return encode("how?")
    return find_prefix(nodes, nodes[name]["parent"]) + tuple(nodes[name]["token_ids"])


async def test_what_is_asked_in_a_prompt_of_its_own_comes_after_the_solution() -> None:
    engine = Grader()
    await run_job(job(in_place=False, criteria=CRITERIA, repeats=2), engine, MemoryJournal())
    closing = encode("</solution>")
    for prompt in engine.prompts:
        same = [other for other in engine.prompts if count_common(prompt, other) > _find(prompt, closing)]
        assert len({*same}) == 4  # two criteria, each twice
    assert encode("how?") == engine.prompts[0][_find(engine.prompts[0], encode("<problem>\n")) :][:4]


def _find(tokens: Sequence[Token], part: Sequence[Token]) -> int:
    """Return the index after the first occurrence."""
    return next(at + len(part) for at in range(len(tokens)) if tokens[at : at + len(part)] == part)


async def test_an_open_thought_is_closed_before_the_question() -> None:
    engine = Grader(thinks=True)
    spec = job("beam").model_copy(update={"steps": None})
    await run_job(spec, engine, MemoryJournal())
    forced = (*encode("\n"), THOUGHT, *encode("\n\n"))
    assert any(forced == prompt[at : at + len(forced)] for prompt in engine.prompts for at in range(len(prompt)))


class TwoModels(Grader):
    async def models(self) -> list[ModelInfo]:
        policy, prm = await super().models()
        return [policy, replace(policy, id="other"), prm]


async def test_another_model_gets_a_prompt_of_its_own_and_cannot_be_asked_in_place() -> None:
    engine = TwoModels()
    spec = job(model="other").model_copy(update={"model": "policy"})
    await run_job(spec, engine, MemoryJournal())
    assert all(prompt[:20] == encode("Grade a solution of a problem.")[:20] for prompt in engine.prompts)
    spec = job(model="other", in_place=True).model_copy(update={"model": "policy"})
    with pytest.raises(InvalidRequest, match="only the model that wrote a branch can be asked behind it"):
        await run_job(spec, engine, MemoryJournal())


class WithAdapter(Grader):
    """An engine with an adapter of the policy that was trained to judge."""

    async def models(self) -> list[ModelInfo]:
        policy, prm = await super().models()
        note = {"invocation": [97, 98], "positive": 71, "negative": 72}
        return [policy, replace(policy, id="judge", parent="policy", extra={JUDGE_NOTE: note}), prm]


@pytest.mark.parametrize("strategy", ["best_of_n", "beam", "tournament"])
async def test_an_adapter_that_was_trained_to_judge_is_asked_its_own_question_behind_the_branch(strategy: str) -> None:
    engine = WithAdapter(lambda prompt, token: math.log(0.6 if token == 71 else 0.2))
    spec = job(strategy, model="judge").model_copy(update={"model": "policy"})
    kind = "compare" if strategy == "tournament" else "score"
    for entry in await find_entries(spec, engine, kind):
        assert entry.data["grades"] == [pytest.approx(0.75)] * (4 if strategy == "tournament" else 1)
    assert {request.model for request in engine.scored} == {"judge"}
    assert {request.token_ids for request in engine.scored} == {(72, 71)}
    assert {prompt[-2:] for prompt in engine.prompts} == {(97, 98)}
    assert {prompt[:4] for prompt in engine.prompts} == {encode("how?")}
    with pytest.raises(InvalidRequest, match=r"verifier\.repeats: adapter 'judge' was trained on one question"):
        await run_job(job(model="judge", repeats=2).model_copy(update={"model": "policy"}), engine, MemoryJournal())


async def test_a_pair_is_graded_in_both_orders_or_in_one() -> None:
    for swap, count in ((True, 4), (False, 2)):
        for entry in await find_entries(job("tournament", swap=swap), Grader(), "compare"):
            grades = entry.data["grades"]
            assert len(grades) == count
            first = 0.5 + (grades[0] - grades[1]) / 2
            expected = first if not swap else (first + 0.5 - (grades[2] - grades[3]) / 2) / 2
            assert entry.data["score"] == pytest.approx(expected)


@given(
    strategy=st.sampled_from(SCORED),
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 6000),
    in_place=st.booleans(),
    repeats=st.integers(1, 3),
    die_after=st.integers(0, 60),
)
async def test_grades_keep_the_budget_and_a_resumed_job_replays_them(
    strategy: str, seed: int, tokens: int, in_place: bool, repeats: int, die_after: int
) -> None:
    spec = job(strategy, tokens, seed, in_place=in_place, repeats=repeats, criteria=CRITERIA)
    await check_budget_and_replay(spec, Grader, order=seed, die_after=die_after)
