"""A server that computes something else when it writes than when it reads is found, with its version and flags."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from engine.remote.consistency import (
    LARGEST_BOUND,
    MEAN_BOUND,
    NUM_TOKENS,
    Consistency,
    TokenCheck,
    check_server,
    judge,
)
from tests.engine.conftest import Checkpoints
from tests.engine.remote.mock_vllm import MockVllm
from tests.engine.serving import served
from tests.listening import listening

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    local = LocalEngine({"policy": POLICY}, EngineOptions(kv_tokens=4096, draft="off"))
    yield local
    await local.close()


async def check(mock: MockVllm, tmp_path: Path) -> Consistency:
    with listening(mock.app, tmp_path / "s") as url:
        [result] = await check_server(url, tokenizer=None if mock.form == "vllm" else POLICY)
    return result


async def test_our_own_server_computes_what_it_says(checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = LocalEngine(
        {"m": checkpoints("qwen3"), "prm": checkpoints("qwen3_classify")}, EngineOptions(kv_tokens=4096)
    )
    with served(engine, tmp_path / "s") as url:
        [result] = await check_server(url)  # a model that only scores writes nothing
    await engine.close()
    assert (result.model, result.verdict) == ("m", "consistent")
    assert "reads what it writes" in result.detail
    assert result.server.startswith("reasoner")


@pytest.mark.parametrize("form", ["vllm", "echo"])
async def test_a_server_of_others_that_computes_its_model_is_consistent(
    engine: LocalEngine, tmp_path: Path, form: str
) -> None:
    result = await check(MockVllm(engine, "policy", form=form), tmp_path)  # type: ignore[arg-type]
    assert (result.model, result.verdict) == ("policy", "consistent"), result
    assert f"of {NUM_TOKENS}," in result.detail


@pytest.mark.parametrize("honest", [0, 1, 5, 20, NUM_TOKENS - 1])
@pytest.mark.parametrize("form", ["vllm", "echo"])
async def test_nonsense_after_the_first_tokens_is_found_and_the_server_named(
    engine: LocalEngine, tmp_path: Path, form: str, honest: int
) -> None:
    entry = {"max_model_len": 256, "root": "/models/policy", "parent": None}
    mock = MockVllm(engine, "policy", honest, form=form, entry=entry)  # type: ignore[arg-type]
    result = await check(mock, tmp_path)
    assert result.verdict == "differs"
    assert "computes something else" in result.detail
    kind = "vllm" if form == "vllm" else "openai"
    assert result.server == f"{kind} 0.32.0, max_model_len 256, root /models/policy"


async def test_a_server_without_log_probabilities_of_a_prompt_is_unknown(engine: LocalEngine, tmp_path: Path) -> None:
    result = await check(MockVllm(engine, "policy", 3, form="none", version=None), tmp_path)
    assert result.verdict == "unknown"
    assert "reports no log-probabilities" in result.detail
    assert result.server == "openai, max_model_len 256"


async def test_a_text_that_is_read_as_other_tokens_cannot_be_compared(engine: LocalEngine, tmp_path: Path) -> None:
    result = await check(MockVllm(engine, "policy", form="echo", splits_alike=False), tmp_path)
    assert result.verdict == "unknown"
    assert "splits the text into other tokens" in result.detail


async def test_a_chat_server_is_asked_nothing_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    [result] = await check_server("http://127.0.0.1:9", models=["gpt"], dialect="chat")
    assert (result.model, result.verdict) == ("gpt", "unknown")
    with pytest.raises(EngineError, match="could not be reached"):
        await check_server(f"unix://{tmp_path / 'nothing'}")


async def test_a_model_of_a_small_context_is_checked_by_a_shorter_text(engine: LocalEngine, tmp_path: Path) -> None:
    result = await check(MockVllm(engine, "policy", entry={"max_model_len": 96}), tmp_path)
    assert result.verdict == "consistent"
    assert "of 32," in result.detail


def tokens(*differences: float) -> list[TokenCheck]:
    return [TokenCheck(-1.0, -1.0 + difference, -1.0 + difference) for difference in differences]


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([], "unknown"),
        (tokens(*[MEAN_BOUND] * 8), "consistent"),
        (tokens(*[MEAN_BOUND + 0.01] * 8), "differs"),
        (tokens(LARGEST_BOUND, *[0.0] * 7), "consistent"),
        (tokens(*[0.0] * 40, LARGEST_BOUND + 0.01), "differs"),
        (tokens(0.0, math.nan), "differs"),
        (tokens(-math.inf, 0.0), "differs"),
        # Both agree, on a token that is not the likeliest one.
        ([TokenCheck(-5.0, -5.0, -0.1), *tokens(*[0.0] * 60)], "differs"),
    ],
)
def test_the_bounds_hold_for_the_mean_and_for_each_token(checks: list[TokenCheck], verdict: str) -> None:
    assert judge(checks)[0] == verdict
