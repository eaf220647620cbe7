"""Statistics of speculative decoding in a branch's usage, in OpenAI's usage object and in the metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion
from engine.scheduler.timings import Timings
from engine.server.metrics import EngineCollector
from engine.speculation.control.controller import FixedController
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import Harness, generate
from tests.engine.serving import served
from tests.engine.speculation.stub_drafters import Oracle

VOCAB = 360
PROMPT = (5, 9, 4, 40, 7)
ASKED = generate(PROMPT, [Branch(3, key, 20 + key) for key in range(3)], temperature=1.0, ignore_eos=True)


def guessed(folder: Path, right: float) -> tuple[list[Completion], Harness]:
    """Return completions of a request whose draft tokens (chains of 3) are accepted with probability ``right``."""
    plain = Harness(folder).complete(ASKED)
    known = {
        (branch.seed, branch.key, len(PROMPT) + place): token
        for branch, completion in zip(ASKED.branches, plain, strict=True)
        for place, token in enumerate(completion.token_ids)
    }
    harness = Harness(folder)
    harness.core.start_speculation(Oracle(known, VOCAB, right), FixedController(3, 3))
    return harness.complete(ASKED), harness


def numbers(harness: Harness) -> dict[str, float]:
    core = harness.core
    engine = SimpleNamespace(
        stats=lambda: {"m": core.stats},
        timings=lambda: {"m": Timings()},
        speculation_stats=lambda: {"m": core.speculation_stats},
    )
    registry = CollectorRegistry()
    registry.register(EngineCollector(cast(LocalEngine, engine)))
    lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    return {
        name.removeprefix("reasoner_engine_"): float(value) for name, value in (one.rsplit(" ", 1) for one in lines)
    }


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_draft_tokens_are_counted_in_usage_and_metrics(checkpoints: Checkpoints, right: float) -> None:
    completions, harness = guessed(checkpoints("qwen3"), right)
    drafted = sum(one.drafted_tokens for one in completions)
    accepted = sum(one.accepted_tokens for one in completions)
    told, label = numbers(harness), '{drafter="oracle",model="m"}'
    assert (told[f"drafted_tokens_total{label}"], told[f"accepted_tokens_total{label}"]) == (drafted, accepted)
    assert (harness.core.stats.drafted_tokens, harness.core.stats.accepted_tokens) == (drafted, accepted)
    assert told[f"draft_size_sum{label}"] == drafted
    assert told[f"accepted_length_sum{label}"] == accepted
    assert told[f"drafting_seconds_total{label}"] > 0
    # Each step with a draft gives its branch the accepted tokens and one more.
    steps = told[f"accepted_length_count{label}"]
    assert steps <= told[f"draft_size_count{label}"]
    assert accepted + steps <= sum(len(one.token_ids) for one in completions)
    assert all(one.accepted_tokens < len(one.token_ids) for one in completions)
    assert drafted > 30
    assert accepted == 0 if right == 0 else accepted > 20


async def test_openai_usage_and_the_client_report_draft_tokens(checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = LocalEngine({"m": checkpoints("qwen3")}, EngineOptions(kv_tokens=2048, draft="ngram"))
    body = {"model": "m", "prompt": [7, 8, 9] * 8, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "n": 2}
    with served(engine, tmp_path / "s") as url:
        transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix://"))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as http:
            usage: dict[str, Any] = (await http.post("/v1/completions", json=body)).json()["usage"]
            choices = (await http.post("/v1/completions", json={**body, "stream_choices": True})).text
    tally = engine.speculation_stats()["m"]
    await engine.close()
    told = usage["completion_tokens_details"]
    assert set(told) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert '"drafted_tokens": ' in choices
    assert told["accepted_prediction_tokens"] + told["rejected_prediction_tokens"] > 0
    assert 0 < told["accepted_prediction_tokens"] <= tally.accepted
