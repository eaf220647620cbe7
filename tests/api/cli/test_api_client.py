"""The command line's client goes on when the service cannot answer for a moment, and does nothing twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import httpx
import pytest

from api.cli import api_client
from api.cli.api_client import REPEATS, ServiceClient, ServiceError
from api.http.problems import BROKER_UNAVAILABLE, SHUTTING_DOWN, Problem, problem_response

JOB = {"id": "job_1", "status": "queued", "created_at": 0.0, "spec": {"problem": "?"}}
EVENT = 'data: {"seq": 1, "type": "job.completed", "at": 0.0, "data": {}}\n\n'


def refused(problem: Problem) -> httpx.Response:
    answer = problem_response(problem, "r")
    return httpx.Response(answer.status_code, content=bytes(answer.body), headers=dict(answer.headers))


class Service:
    """Answers in turn, the last answer for ever."""

    def __init__(self, *answers: httpx.Response) -> None:
        self._answers: Iterator[httpx.Response] = itertools.chain(answers, itertools.repeat(answers[-1]))
        self.asked: list[httpx.Request] = []
        self.client = ServiceClient("http://service")
        self.client._http = httpx.Client(base_url="http://service", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return next(self._answers)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "PAUSE_SECONDS", 0.0)


@pytest.mark.parametrize("problem", [BROKER_UNAVAILABLE, SHUTTING_DOWN], ids=lambda problem: problem.code)
def test_a_job_that_was_refused_for_the_moment_is_sent_again_under_the_same_key(problem: Problem) -> None:
    service = Service(refused(problem), refused(problem), httpx.Response(202, json=JOB))
    assert service.client.submit({"problem": "?"}).id == "job_1"
    assert len(service.asked) == 3
    assert len({request.headers["Idempotency-Key"] for request in service.asked}) == 1
    service.client.submit({"problem": "?"})
    assert service.asked[3].headers["Idempotency-Key"] != service.asked[0].headers["Idempotency-Key"]


def test_an_event_stream_that_was_refused_for_the_moment_is_asked_for_again() -> None:
    stream = httpx.Response(200, content=EVENT.encode(), headers={"Content-Type": "text/event-stream"})
    service = Service(refused(BROKER_UNAVAILABLE), stream)
    assert [event.seq for event in service.client.events("job_1")] == [1]


@pytest.mark.parametrize("call", [lambda client: client.get("job_1"), lambda client: list(client.events("job_1"))])
def test_a_broker_that_stays_away_is_said_in_the_end(call: Callable[[ServiceClient], object]) -> None:
    service = Service(refused(BROKER_UNAVAILABLE))
    with pytest.raises(ServiceError, match="the job store cannot be reached"):
        call(service.client)
    assert len(service.asked) == REPEATS + 1


def test_what_is_refused_for_good_and_what_could_be_done_twice_is_sent_once() -> None:
    full = Service(refused(Problem(503, "queue-full", "as many as may")))
    with pytest.raises(ServiceError, match="as many as may"):
        full.client.submit({"problem": "?"})
    away = Service(refused(BROKER_UNAVAILABLE))
    with pytest.raises(ServiceError, match="cannot be reached"):
        away.client.delete("job_1")
    assert (len(full.asked), len(away.asked)) == (1, 1)
