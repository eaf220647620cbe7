"""The judge: its score is transformers' probability of Yes against No, and only new tokens are computed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from prm.scorers.judge import TEMPLATE, Judge
from tests.prm.checkpoints import save_checkpoint, score_gap

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many are 3 and 4?"}]
QUESTION = "System: Be brief.\n\nUser: How many are 3 and 4?"
SOLUTIONS = ("add 3 and 4 to get 7.", "add 3 and 4 to get 7.\n\nso the answer is \\boxed{7}")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[LocalEngine, Path]]:
    torch.set_num_threads(1)
    folder = save_checkpoint("rlhflow_llama", tmp_path / "judge")
    local = LocalEngine({"judge": folder}, EngineOptions(kv_tokens=4096, max_running=32, step_tokens=512))
    yield local, folder
    await local.close()


@torch.no_grad()
def reference(folder: Path, solution: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = TEMPLATE.format(question=QUESTION, solution=solution)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], return_dict=False, add_generation_prompt=True
    )
    verdicts = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")]
    assert verdicts[0] != verdicts[1]
    return float(model(torch.tensor([ids])).logits[0, -1, verdicts].softmax(-1)[0])


async def test_a_verdict_is_the_probability_of_yes_against_no(served: tuple[LocalEngine, Path]) -> None:
    engine, folder = served
    [info] = await engine.models()
    judge = await Judge.open(engine, info, CHAT)
    short, long = [(await judge.score([solution]))[0] for solution in SOLUTIONS]
    for solution, reading in zip(SOLUTIONS, (short, long), strict=True):
        assert reading.scores == pytest.approx((reference(folder, solution),), abs=score_gap("rlhflow_llama", folder))
    assert short.scores != long.scores
    # Question and first step are cached by then; the second step and the request for a verdict are not.
    assert long.cached > short.computed / 2
    assert long.computed < short.computed
