"""Outcome reward models: the score of a whole solution equals that of transformers' sequence classifier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from prm.scorers.outcome import OutcomeScorer, is_outcome_model
from tests.prm.checkpoints import save_checkpoint, score_gap

CHAT = [{"role": "user", "content": "How many are 3 and 4?"}]
SOLUTIONS = ("add 3 and 4 to get 7.\n\nso the answer is \\boxed{7}", "add 3 and 4 to get 7.\n\nso it is 8", "1")


@pytest.fixture(params=["outcome", "outcome_two"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[LocalEngine, Path]]:
    """Serve a checkpoint whose folder is named after its kind."""
    torch.set_num_threads(1)
    folder = save_checkpoint(request.param, tmp_path / request.param)
    local = LocalEngine({"orm": folder}, EngineOptions(kv_tokens=4096, max_running=32, step_tokens=512))
    yield local, folder
    await local.close()


@torch.no_grad()
def reference(folder: Path, solution: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = tokenizer.apply_chat_template(
        [*CHAT, {"role": "assistant", "content": solution}], return_dict=False, add_generation_prompt=False
    )
    # The end of a turn is also the padding token, which the class would skip as padding at the end.
    model.config.pad_token_id = None
    logits = model(torch.tensor([ids])).logits[0]
    return float(torch.sigmoid(logits[0]) if len(logits) == 1 else logits.softmax(-1)[1])


async def test_scores_equal_those_of_transformers_and_common_prefixes_are_shared(
    served: tuple[LocalEngine, Path],
) -> None:
    engine, folder = served
    [info] = await engine.models()
    assert is_outcome_model(info)
    readings = await OutcomeScorer(engine, info, CHAT).score(SOLUTIONS)
    for solution, reading in zip(SOLUTIONS, readings, strict=True):
        assert reading.scores == pytest.approx((reference(folder, solution),), abs=score_gap(folder.name, folder))
    assert sum(reading.cached for reading in readings) > 0
    [again] = await OutcomeScorer(engine, info, CHAT).score(SOLUTIONS[:1])
    assert again.scores == pytest.approx(readings[0].scores, abs=score_gap(folder.name, folder))


async def test_a_bound_on_computation_is_enforced(served: tuple[LocalEngine, Path]) -> None:
    engine, _ = served
    [info] = await engine.models()
    scorer = OutcomeScorer(engine, info, CHAT)
    [refused] = await scorer.score(SOLUTIONS[:1], max_compute=3)
    assert refused.scores is None
    [reading] = await scorer.score(SOLUTIONS[:1], max_compute=refused.computed)
    assert reading.computed == refused.computed
