"""A verifier behind our own server: format queries and scores are the same over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import TokenizeRequest
from engine.remote.http import HttpEngine
from engine.remote.router import RoutedEngine
from prm.scorers.steps import StepChain, StepScorer
from tests.engine.serving import served
from tests.prm.checkpoints import save_checkpoint, score_gap

CHAT = [{"role": "user", "content": "How many are 3 and 4?"}]
STEPS = ("add 3 and 4 to get 7.", "so it is 7")


async def test_scores_and_tokens_over_http_equal_those_of_the_engine(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = save_checkpoint("math_shepherd", tmp_path / "prm")
    local = LocalEngine({"prm": folder}, EngineOptions(kv_tokens=2048, max_running=8, step_tokens=256))
    with served(local, tmp_path / "engine.sock") as url:
        http = RoutedEngine(HttpEngine(url), {"prm": HttpEngine(url)})
        assert await http.models() == await local.models()
        for special in (True, False):
            expected = await local.tokenize(TokenizeRequest("prm", "add 3", special=special))
            assert await http.tokenize(TokenizeRequest("prm", "add 3", special=special)) == expected
        assert expected != await local.tokenize(TokenizeRequest("prm", "add 3"))
        said = [*CHAT, {"role": "assistant", "content": "7"}]
        for generation_prompt in (True, False):
            expected = await local.tokenize(TokenizeRequest("prm", said, generation_prompt=generation_prompt))
            assert await http.tokenize(TokenizeRequest("prm", said, generation_prompt=generation_prompt)) == expected
        readings = []
        for engine in (local, http):
            [info] = await engine.models()
            scorer = StepScorer(engine, info)
            readings += await scorer.score(await scorer.encode_question(CHAT), [StepChain(STEPS)])
        assert readings[0].scores == pytest.approx(readings[1].scores, abs=score_gap("math_shepherd", folder))
        assert (readings[0].cached, readings[1].computed + readings[1].cached) == (0, readings[0].computed)
        await http.close()
    await local.close()
