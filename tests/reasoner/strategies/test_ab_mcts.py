"""Adaptive branching: it refines good solutions, widens where all are bad, and learns which model helps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.protocol.types import Completion, GenerateRequest, ModelInfo, ScoreRequest, ScoreResult, TokenizeRequest
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import run_job
from tests.reasoner.search.test_policies import spec
from tests.reasoner.strategies.test_sampling_strategies import told
from tests.scripted import EOS, ScriptedEngine


class Graded(ScriptedEngine):
    """Two policies whose every solution is a number; ``grade`` is the verifier's score of a solution's text."""

    def __init__(self, texts: dict[str, str], grades: dict[str, float], refined: str | None = None) -> None:
        super().__init__(context=4000)
        self._texts = texts
        self._grades = grades
        self._refined = refined

    async def models(self) -> list[ModelInfo]:
        policy, prm = await super().models()
        return [policy, replace(policy, id="other"), replace(prm, context=4000)]

    def _complete(self, request: GenerateRequest, index: int) -> Completion:
        text = self._texts[request.model]
        if self._refined is not None and len(request.prompt) > len("how?"):
            text = self._refined
        [digit] = str(len(self.requests) % 10)
        ids = (60 + int(digit), 70 + index, EOS)
        self.outstanding -= request.branches[index].max_tokens
        self.total += 3
        return Completion(index, ids, text, "stop", EOS, -1.0, len(request.prompt), 0)

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        results = await super().score(request)
        graded = []
        for item, result in zip(request.items, results, strict=True):
            text = "".join(part for part in item.parts if isinstance(part, str))
            grade = next(value for name, value in self._grades.items() if name in text)
            graded.append(replace(result, values=tuple((0.0, logit(grade)) for _ in item.read)))
        return graded


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


async def solve(engine: ScriptedEngine, seed: int, **params: Any) -> tuple[Any, MemoryJournal]:
    journal = MemoryJournal()
    job = spec({"name": "ab_mcts", "request": "Again?", **params}, seed)
    return await run_job(job, engine, journal), journal


@pytest.mark.parametrize("variant", ["a", "m"])
async def test_the_better_model_gets_most_of_the_solutions(variant: str) -> None:
    written = Counter[str]()
    for seed in range(6):
        engine = Graded({"policy": "\\boxed{1}", "other": "\\boxed{2}"}, {"{1}": 0.05, "{2}": 0.9})
        outcome, journal = await solve(engine, seed, n=32, parallel=2, variant=variant)
        assert outcome.result.answer == "2"
        written.update(data["model"] for data in told(journal).values() if data["reason"] != "said")
    assert written["other"] > 4 * written["policy"]


@pytest.mark.parametrize("variant", ["a", "m"])
async def test_it_goes_deeper_where_refinements_are_better_and_wider_where_they_are_worse(variant: str) -> None:
    worse, better = [await measure_refined(variant, grade) for grade in (0.02, 0.97)]
    assert better > 0.7
    assert worse < 0.6 * better


async def measure_refined(variant: str, grade: float) -> float:
    """Return the share of refined solutions where new ones have the score 0.5 and refined ones this grade."""
    deep = total = 0
    for seed in range(6):
        texts = {"policy": "\\boxed{1}", "other": "\\boxed{1}"}
        engine = Graded(texts, {"{1}": 0.5, "{3}": grade}, refined="\\boxed{3}")
        _, journal = await solve(engine, seed, n=32, parallel=2, variant=variant)
        solutions = [node for node, data in told(journal).items() if data["reason"] != "said"]
        total += len(solutions)
        deep += sum(node.count(".") > 1 for node in solutions)
    return deep / total


async def test_the_first_round_is_spread_by_weight_and_n_bounds_all_solutions() -> None:
    engine = Graded({"policy": "\\boxed{1}", "other": "\\boxed{2}"}, {"{1}": 0.5, "{2}": 0.5})
    _, journal = await solve(engine, 1, n=7, parallel=3)
    solutions = [data for data in told(journal).values() if data["reason"] != "said"]
    assert len(solutions) == 7
    first = Counter(data["model"] for data in solutions[:3])
    assert first == {"policy": 2, "other": 1}


async def test_a_refined_solution_follows_the_one_it_refines_in_its_conversation() -> None:
    engine = Graded({"policy": "\\boxed{1}", "other": "\\boxed{1}"}, {"{1}": 0.9})
    await solve(engine, 2, n=16, parallel=2)
    expected = await engine.tokenize(TokenizeRequest("policy", "how?\\boxed{1}Again?"))
    prompts: Sequence[tuple[int, ...]] = [request.prompt for request in engine.requests]
    assert expected in prompts
    assert set(prompts) == {expected, await engine.tokenize(TokenizeRequest("policy", "how?"))}
