"""Jobs of the whole service on OpenAI's chat API, by a server that follows its documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.service.deployment import OURS, Deployment
from tests.e2e.openai_mock import ANSWER_TOKENS, CACHED_TOKENS, KEY, MODEL, REASONING_TOKENS, HostedChat
from tests.listening import listening

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def hosted() -> HostedChat:
    return HostedChat()


@pytest.fixture
def service(hosted: HostedChat, tmp_path: Path) -> Iterator[httpx.Client]:
    """The API and a worker on the hosted model, which allows four open requests."""
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n")
    with listening(hosted.app, tmp_path / "s") as url:
        profile = {"url": url, "kind": "chat", "models": [MODEL], "api_key_file": str(key), "concurrency": 4}
        models: dict[str, Any] = {"model": MODEL, "prm": "none", "engines": {"openai": profile}}
        with Deployment(0.0, concurrency=2, models=models) as deployment:
            deployment.start(OURS, "worker")
            deployment.start(OURS, "api")
            with httpx.Client(base_url=deployment.url(OURS), timeout=90) as client:
                yield client
            logs = "".join(path.read_text() for path in deployment.folder.glob("*.log"))
            assert KEY not in logs


def solve(service: httpx.Client, **spec: Any) -> dict[str, Any]:
    body = {"problem": "2 + 2?", "seed": 1, "budget": {"tokens": 20_000}} | spec
    answer: dict[str, Any] = service.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"}).json()
    return answer


def test_a_vote_survives_limits_and_cuts_and_is_billed_as_the_server_bills(
    service: httpx.Client, hosted: HostedChat
) -> None:
    job = solve(service, strategy={"name": "self_consistency", "n": 9})
    assert job["status"] == "completed", job
    assert job["attempt"] == 1
    assert job["result"]["answer"] == "4"
    assert hosted.refused == 2
    assert len(hosted.requests) == 9 + 2 + 1
    usage = job["usage"]
    assert hosted.billed == 9 * (REASONING_TOKENS + ANSWER_TOKENS)
    # The stream that was cut had sent one part, which counts as a token.
    assert usage["generated"] == hosted.billed + 1
    assert (usage["thought"], job["result"]["thought"]) == (9 * REASONING_TOKENS, "")
    assert usage["cached"] == 9 * CACHED_TOKENS
    assert {request["seed"] for request in hosted.requests[3:]} != {None}
    assert all(request["stream_options"] == {"include_usage": True} for request in hosted.requests)


def test_a_thought_is_the_reasoning_content_of_our_own_chat_api(service: httpx.Client, hosted: HostedChat) -> None:
    hosted.refusals = hosted.cuts = 0
    hosted.thought = "Two and two."
    body = {"model": MODEL, "messages": [{"role": "user", "content": "2 + 2?"}], "seed": 1}
    body |= {"strategy": {"name": "self_consistency", "n": 2}, "chat_template_kwargs": {"reasoning_effort": "high"}}
    answer = service.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "Two and two."
    assert message["content"].startswith("The sum is") or message["content"].startswith("It must be")
    usage = answer["usage"]
    assert usage["completion_tokens"] - usage["completion_tokens_details"]["reasoning_tokens"] == ANSWER_TOKENS
    assert [request["reasoning_effort"] for request in hosted.requests] == ["high"] * 2


def test_a_model_that_is_gone_fails_the_job_and_is_named(service: httpx.Client, hosted: HostedChat) -> None:
    hosted.refusals = hosted.cuts = 0
    hosted.is_model_gone = True
    job = solve(service, strategy={"name": "greedy"})
    assert MODEL in str(job), job
    assert job["status"] in ("failed", 422, 503)


def test_what_the_server_cannot_do_is_refused_by_name(service: httpx.Client) -> None:
    for strategy in ("beam", "deepconf"):
        refused = solve(service, strategy={"name": strategy}, verifier={"kind": "judge"})
        assert refused["status"] == 422
        assert f"strategy '{strategy}'" in refused["detail"]
        assert f"model '{MODEL}' cannot do" in refused["detail"]
