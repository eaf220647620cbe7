"""Steps are steps however their lines end."""

from __future__ import annotations

import pytest

from prm.scorers.steps import StepScorer
from tests.reasoner.search.test_thought_texts import Scoring, select
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

STEPS = ("3 + 4 = 7", "So it is\n7.", "\\boxed{7}")
ENDS = ["\n", "\r\n", "\r"]


@pytest.mark.parametrize("end", ENDS)
async def test_a_reward_model_reads_the_same_steps(end: str) -> None:
    engine = ScriptedEngine()
    scorer = StepScorer(engine, (await engine.models())[1])
    text = "\n\n".join(STEPS).replace("\n", end)
    assert scorer.steps(text, complete=True) == STEPS
    assert scorer.steps(text, complete=False) == STEPS[:2]
    assert scorer.steps(f"{text}{end}{end}", complete=False) == STEPS


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["prm", "generative"])
async def test_a_candidate_has_the_same_score(end: str, kind: str) -> None:
    texts = ["\n\n".join(STEPS).replace("\n", each) for each in ("\n", end)]
    verifier = {"kind": "prm"} if kind == "prm" else {"kind": "generative", "max_tokens": 0, "by_step": True}
    scores = [(await select(text, engine=Scoring(), verifier=verifier)).result.confidence for text in texts]
    assert scores[0] == scores[1]
    assert scores[0] is not None


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (None, "a\r\n\r\n"),
        ({"by": "separator", "text": "\n---\n"}, "a\r\n---\r\n"),
        ({"by": "sentence"}, "It is so.\r\n"),
        ({"by": "sentence"}, "Is it so?\r"),
        ({"by": "markers", "words": ["Wait"]}, "It is so.\r\nWait"),
    ],
)
def test_a_rule_of_steps_ends_them_there(steps: dict[str, object] | None, text: str) -> None:
    rule = build_spec({"problem": "?", "steps": steps}).step_rule
    assert any(stop in text for stop in rule.stops)
