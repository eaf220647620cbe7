"""Scores of steps by critiques: each beginning is judged by itself, and nonsense gives no score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.protocol.types import GenerateRequest, TokenizeRequest, TokenLogprob
from prm.scorers.written_steps import WrittenStepScorer
from tests.scripted import ScriptedEngine, label_logprobs


class Nonsense(ScriptedEngine):
    """Writes no label where one is due."""

    def _logprobs(self, request: GenerateRequest, branch: Any, ids: list[int]) -> tuple[TokenLogprob, ...] | None:
        if request.sampling.ignore_eos:
            return (TokenLogprob(ids[0], -0.01, ((7, -0.01),)),)
        return super()._logprobs(request, branch, ids)


async def open_scorer(engine: ScriptedEngine, votes: int = 1) -> WrittenStepScorer:
    info = (await engine.models())[0]
    return await WrittenStepScorer.open(engine, replace(info, context=4000), votes, 16)


async def test_each_beginning_has_its_own_prompt_and_score() -> None:
    engine = ScriptedEngine(context=4000)
    scorer = await open_scorer(engine)
    scores = await scorer.score("how?", ["one", "two", "three"])
    prompts = {request.prompt for request in engine.verdict_requests if not request.sampling.ignore_eos}
    expected = [
        await engine.tokenize(TokenizeRequest("policy", f"how? {text}"))
        for text in ("one", "one\n\ntwo", "one\n\ntwo\n\nthree")
    ]
    assert prompts == set(expected)
    assert all(score is not None and 0.1 <= score <= 0.9 for score in scores)
    assert len(set(scores)) == 3


@pytest.mark.parametrize("votes", [1, 4])
async def test_a_score_is_the_mean_of_the_labels_probabilities(votes: int) -> None:
    engine = ScriptedEngine(context=4000)
    [score] = await (await open_scorer(engine, votes)).score("how?", ["one"])
    read = [request for request in engine.verdict_requests if request.sampling.ignore_eos]
    assert len(read) == votes
    shares = []
    for request in read:
        listed = dict(label_logprobs(request.prompt + request.branches[0].generated))
        yes, no = (2.718281828459045 ** listed[50 + ord(label) % 50] for label in "YN")
        shares.append(yes / (yes + no))
    assert score == pytest.approx(sum(shares) / votes)


async def test_a_model_that_writes_nonsense_and_a_context_that_is_too_short_give_no_score() -> None:
    assert await (await open_scorer(Nonsense(context=4000))).score("how?", ["one", "two"]) == [None, None]
    engine = ScriptedEngine()
    scorer = await WrittenStepScorer.open(engine, (await engine.models())[0], 1, 16)
    assert await scorer.score("how?", ["x" * 300]) == [None]
