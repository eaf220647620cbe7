"""Step scoring: requests to the engine, and conversion of its logits to scores."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.protocol.types import EngineError, ModelInfo, ScoreRequest, ScoreResult
from prm.scorers.steps import AGGREGATIONS, StepChain, StepScorer, aggregate
from tests.scripted import SEPARATOR, ScriptedEngine

NOTES = {"format": "token_classification", "separator": "\n\n", "positive_label": 1}
INFO = ModelInfo("prm", "classify", 512, 100, 1000, extra={"reasoner_prm": NOTES})
QUESTION = [{"role": "user", "content": "how?"}]


class Recording(ScriptedEngine):
    def __init__(self, logits: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.asked: list[ScoreRequest] = []
        self.logits = logits

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        self.asked.append(request)
        rows = [tuple(self.logits for _ in item.read) for item in request.items]
        return [ScoreResult(index, row, 5, 7) for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("text", "complete", "steps"),
    [
        ("a\n\nb\n\n", False, ("a", "b")),
        ("a\n\nb", False, ("a",)),
        ("a\n\nb", True, ("a", "b")),
        ("a\n\n\n\nb\n\n", True, ("a", "b")),
        ("a\n\n  \n\n", True, ("a",)),
        ("\n\n", True, ()),
        ("", True, ()),
    ],
)
def test_empty_and_unfinished_steps_are_not_scored(text: str, complete: bool, steps: tuple[str, ...]) -> None:
    assert StepScorer(ScriptedEngine(), INFO).steps(text, complete=complete) == steps


async def test_only_separators_of_new_steps_are_read_and_a_longer_chain_extends_the_shorter_one() -> None:
    engine = Recording()
    scorer = StepScorer(engine, INFO)
    prompt = await scorer.encode_question(QUESTION)
    await scorer.score(prompt, [StepChain(("a",)), StepChain(("a", "b"), scored=1)], max_compute=9)
    (request,) = engine.asked
    short, long = request.items
    assert short.parts == (prompt.tokens, "a", (SEPARATOR,))
    assert long.parts[: len(short.parts)] == short.parts
    assert (short.read, long.read) == ((2,), (4,))
    assert request.max_compute == 9


async def test_a_score_is_the_softmax_probability_of_the_positive_label() -> None:
    scorer = StepScorer(Recording(logits=(1000.0, 1001.0)), INFO)
    (result,) = await scorer.score(await scorer.encode_question(QUESTION), [StepChain(("a",))])
    assert result.scores == pytest.approx((1 / (1 + math.exp(-1.0)),))


@pytest.mark.parametrize(
    ("kind", "notes", "message"),
    [
        ("generate", None, "'m' is not known to be a process reward model.*one of token_classification, qwen_math"),
        ("classify", None, "'reasoner_prm' in its config.json"),
        ("generate", NOTES, "is for a model that classifies tokens"),
        ("classify", {"format": "math_shepherd"}, "is for a causal language model"),
        ("classify", {"format": "oracle"}, "PRM format 'oracle'; known are token_classification"),
        ("classify", NOTES | {"softmax": True}, "fields that format 'token_classification' does not know: softmax"),
        ("classify", {"format": "token_classification", "separator": "\n"}, "needs 'positive_label'"),
        ("classify", NOTES | {"separator": ""}, "separator must be a text"),
        ("classify", NOTES | {"positive_label": "good"}, "positive_label the index"),
    ],
)
def test_a_model_that_is_no_step_verifier_is_refused_with_the_missing_part(
    kind: Any, notes: dict[str, object] | None, message: str
) -> None:
    info = ModelInfo("m", kind, 1, 1, 1, extra={} if notes is None else {"reasoner_prm": notes})
    with pytest.raises(EngineError, match=message):
        StepScorer(ScriptedEngine(), info)


async def test_an_unknown_label_is_refused() -> None:
    info = ModelInfo("m", "classify", 512, 100, 1000, extra={"reasoner_prm": NOTES | {"positive_label": 2}})
    scorer = StepScorer(Recording(), info)
    with pytest.raises(EngineError, match="positive_label is 2, but it has 2 labels"):
        await scorer.score(await scorer.encode_question(QUESTION), [StepChain(("a",))])


def test_aggregations_match_their_definitions() -> None:
    scores = (0.5, 0.9, 0.2)
    expected = {"last": 0.2, "min": 0.2, "max": 0.9, "prod": 0.09, "mean": 1.6 / 3}
    assert {how: pytest.approx(aggregate(scores, how)) for how in AGGREGATIONS} == expected
