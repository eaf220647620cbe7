"""Jobs of the whole service on a hosted model whose server fails for ever, from some request on, or refuses some."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.service.deployment import OURS, Deployment
from tests.chaos.processes import until
from tests.listening import listening
from tests.long import mostly_long

pytestmark = pytest.mark.timeout(240)

MODEL = "hosted"
WAIT_SECONDS = 8


def solution() -> Response:
    events = [
        {"choices": [{"index": 0, "delta": {"content": "The answer is \\boxed{4}."}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}},
    ]
    content = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return Response(content, media_type="text/event-stream")


def error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


class Server:
    """A chat server whose answers come from ``answer``, by the number of the request."""

    def __init__(self) -> None:
        self.answer: Callable[[int], Response] = lambda _: solution()
        self.num_requests = 0
        routes = [Route("/v1/models", self._models), Route("/v1/chat/completions", self._chat, methods=["POST"])]
        self.app = Starlette(routes=routes)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": MODEL}]})

    async def _chat(self, _: Request) -> Response:
        self.num_requests += 1
        return self.answer(self.num_requests)


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture(scope="module")
def deployment(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("server")
    with listening(server.app, folder / "s") as url:
        engines = {"there": {"url": url, "kind": "chat", "models": [MODEL]}}
        with Deployment(0.0, concurrency=2, models={"model": MODEL, "prm": "none", "engines": engines}) as deployment:
            deployment.start(OURS, "worker")
            deployment.start(OURS, "api")
            yield deployment


@pytest.fixture(scope="module")
def service(deployment: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=deployment.url(OURS), timeout=90) as client:
        yield client


def submit(service: httpx.Client, server: Server, n: int = 4, wait_seconds: float = WAIT_SECONDS) -> dict[str, Any]:
    server.num_requests = 0
    body = {"problem": "2 + 2?", "seed": 1, "budget": {"tokens": 20_000}, "engine_wait_seconds": wait_seconds}
    job: dict[str, Any] = service.post(
        "/v1/jobs", json=body | {"strategy": {"name": "self_consistency", "n": n}}
    ).json()
    return job


def end(service: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        now: dict[str, Any] = service.get(f"/v1/jobs/{job['id']}", params={"wait": 20}).json()
        return now if now["finished_at"] is not None else None

    return until(look, "the job has ended", seconds=120)


@pytest.mark.parametrize(
    ("answer", "words"),
    mostly_long(
        [
            (lambda _: error(500, "an internal error of theirs"), "an internal error of theirs"),
            (lambda _: Response("<html>", media_type="text/html"), "not an OpenAI completion: content-type text/html"),
            (lambda _: error(429, "the quota is used up"), "the quota is used up"),
        ],
        every=3,
    ),
)
def test_a_job_whose_server_fails_for_ever_says_so_while_it_waits_and_ends(
    service: httpx.Client, server: Server, answer: Callable[[int], Response], words: str
) -> None:
    server.answer = answer
    job = submit(service, server)

    def look() -> dict[str, Any] | None:
        waiting: dict[str, Any] | None = service.get(f"/v1/jobs/{job['id']}").json()["waiting"]
        return waiting

    waiting = until(look, "the job waits")
    assert waiting["reason"] in ("engine_unavailable", "engine_busy")
    assert words in waiting["detail"]
    ended = end(service, job)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "engine_unavailable")
    assert words in ended["error"]["message"]
    assert ended["usage"]["generated"] == 0
    events = service.get(f"/v1/jobs/{job['id']}/events").text
    assert words in events
    assert events.count("event: job.queued") <= 3


def test_a_job_ends_with_what_it_has_when_its_server_fails_from_then_on(service: httpx.Client, server: Server) -> None:
    server.answer = lambda number: solution() if number <= 3 else error(503, "overloaded for ever")
    ended = end(service, submit(service, server, n=6))
    assert ended["status"] == "completed"
    assert ended["result"]["finish_reason"] == "engine_unavailable"
    assert ended["result"]["answer"] == "4"
    assert "overloaded for ever" in ended["result"]["note"]
    assert ended["usage"]["generated"] == 3 * 7


@pytest.mark.parametrize("recovers", [True, False])
def test_a_job_whose_worker_is_killed_while_its_server_fails_keeps_its_samples_and_its_bill(
    deployment: Deployment, service: httpx.Client, server: Server, recovers: bool
) -> None:
    """The samples that the server answered are paid once, whether it answers again after the kill or never does."""
    answered: list[int] = []
    most = 2

    def answer(number: int) -> Response:
        if len(answered) < most:
            answered.append(number)
            return solution()
        return error(503, "overloaded")

    server.answer = answer
    job = submit(service, server, wait_seconds=60 if recovers else WAIT_SECONDS)
    until(lambda: service.get(f"/v1/jobs/{job['id']}").json()["waiting"], "the job waits")
    os.kill(deployment.pids[OURS, "worker"], signal.SIGKILL)
    most = 4 if recovers else 2
    deployment.start(OURS, "worker")
    ended = end(service, job)
    assert (ended["status"], ended["result"]["answer"]) == ("completed", "4")
    assert ended["result"]["finish_reason"] == ("answer" if recovers else "engine_unavailable")
    assert len(answered) == (4 if recovers else 2)
    assert ended["usage"]["generated"] == 7 * len(answered)


def test_one_refused_sample_ends_alone(service: httpx.Client, server: Server) -> None:
    server.answer = lambda number: error(400, "flagged by the content filter") if number == 2 else solution()
    ended = end(service, submit(service, server))
    assert (ended["status"], ended["result"]["answer"], ended["result"]["finish_reason"]) == (
        "completed",
        "4",
        "answer",
    )
    assert ended["result"]["votes"][0]["count"] == 3
    tree = service.get(f"/v1/jobs/{ended['id']}/tree").json()
    refused = [node["refusal"] for node in tree["nodes"] if node["state"] == "refused"]
    assert refused == ["flagged by the content filter"]


def test_a_job_of_refused_samples_fails_with_the_servers_words(service: httpx.Client, server: Server) -> None:
    server.answer = lambda _: error(400, "flagged by the content filter")
    ended = end(service, submit(service, server))
    assert (ended["status"], ended["error"]) == (
        "failed",
        {"code": "invalid_request", "message": "flagged by the content filter"},
    )
    assert server.num_requests == 4
