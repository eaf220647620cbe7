"""The client retries requests while the service is briefly unavailable, except those that could be executed twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import httpx
import pytest

from api.http.problems import BROKER_UNAVAILABLE, SHUTTING_DOWN, Problem, problem_response
from reasoner.client import Client, ServiceError, _client, _requests
from tests.specs import build_spec

JOB = {"id": "job_1", "status": "queued", "created_at": 0.0, "spec": build_spec(problem="?").model_dump()}
EVENT = 'data: {"seq": 1, "type": "job.completed", "at": 0.0, "data": {}}\n\n'


def refused_with(problem: Problem) -> httpx.Response:
    answer = problem_response(problem, "r")
    return httpx.Response(answer.status_code, content=bytes(answer.body), headers=dict(answer.headers))


class Service:
    """Transport that sends its responses in order and repeats the last one."""

    def __init__(self, *responses: httpx.Response) -> None:
        self._responses: Iterator[httpx.Response] = itertools.chain(responses, itertools.repeat(responses[-1]))
        self.requests: list[httpx.Request] = []
        self.client = Client("http://service", transport=httpx.MockTransport(self._respond))

    def _respond(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return next(self._responses)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_client, "PAUSE_SECONDS", 0.0)


@pytest.mark.parametrize("problem", [BROKER_UNAVAILABLE, SHUTTING_DOWN], ids=lambda problem: problem.code)
def test_a_submission_is_retried_with_the_same_idempotency_key_after_a_transient_error(problem: Problem) -> None:
    service = Service(refused_with(problem), refused_with(problem), httpx.Response(202, json=JOB))
    assert service.client.submit({"problem": "?"}).id == "job_1"
    assert len(service.requests) == 3
    assert len({request.headers["Idempotency-Key"] for request in service.requests}) == 1
    service.client.submit({"problem": "?"})
    assert service.requests[3].headers["Idempotency-Key"] != service.requests[0].headers["Idempotency-Key"]


def test_an_event_stream_is_retried_after_a_transient_error() -> None:
    stream = httpx.Response(200, content=EVENT.encode(), headers={"Content-Type": "text/event-stream"})
    service = Service(refused_with(BROKER_UNAVAILABLE), stream)
    assert [event.seq for event in service.client.events("job_1")] == [1]


@pytest.mark.parametrize("call", [lambda client: client.get("job_1"), lambda client: list(client.events("job_1"))])
def test_a_persistent_error_is_raised_after_the_last_retry(call: Callable[[Client], object]) -> None:
    service = Service(refused_with(BROKER_UNAVAILABLE))
    with pytest.raises(ServiceError, match="the job store cannot be reached"):
        call(service.client)
    assert len(service.requests) == _requests.MAX_REPEATS + 1


def test_permanent_errors_and_requests_without_idempotency_key_are_not_retried() -> None:
    full = Service(refused_with(Problem(503, "queue-full", "as many as may")))
    with pytest.raises(ServiceError, match="as many as may"):
        full.client.submit({"problem": "?"})
    away = Service(refused_with(BROKER_UNAVAILABLE))
    with pytest.raises(ServiceError, match="cannot be reached"):
        away.client.delete("job_1")
    assert (len(full.requests), len(away.requests)) == (1, 1)
