"""An API that receives SIGTERM answers all waiting calls, and their jobs continue elsewhere."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.service.null_engine import POLICY
from tests.chaos.fleet import Fleet
from tests.chaos.processes import until

ASKED = [{"role": "user", "content": "1 + 1?"}]
CALLS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("/v1/jobs", {"problem": "1 + 1?"}, {"Prefer": "wait=60"}),
    ("/v1/chat/completions", {"model": POLICY, "messages": ASKED}, {"Idempotency-Key": "chat"}),
    ("/v1/chat/completions", {"model": POLICY, "messages": ASKED, "stream": True}, {"Idempotency-Key": "chunks"}),
    ("/v1/responses", {"model": POLICY, "input": "1 + 1?"}, {"Idempotency-Key": "response"}),
    ("/v1/responses", {"model": POLICY, "input": "1 + 1?", "stream": True}, {"Idempotency-Key": "events"}),
]

pytestmark = pytest.mark.timeout(180)


def test_sigterm_answers_every_waiting_call_and_a_retry_returns_the_same_jobs(tmp_path: Path) -> None:
    with Fleet(tmp_path, workers=0, apis=1, token_seconds=0.0) as fleet, ThreadPoolExecutor(len(CALLS)) as pool:

        def call(number: int) -> httpx.Response:
            path, body, headers = CALLS[number]
            return httpx.post(f"http://127.0.0.1:{fleet.ports[0]}{path}", json=body, headers=headers, timeout=60)

        def is_up() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{fleet.ports[0]}/healthz").is_success
            except httpx.TransportError:
                return False

        until(is_up, "the API answers")
        answers = [pool.submit(call, number) for number in range(len(CALLS))]
        until(lambda: int(fleet.redis.info("clients")["blocked_clients"]) == len(CALLS), "all wait")
        api = fleet.process("api")
        api.send_signal(signal.SIGTERM)
        job, chat, chunks, response, events = [answer.result() for answer in answers]
        assert api.wait(60) == 128 + signal.SIGTERM
        assert (job.status_code, job.json()["status"]) == (202, "queued")
        for refused in (chat, response):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert int(refused.headers["retry-after"]) >= 1
        for stream in (chunks, events):
            assert stream.status_code == 200
            assert "shutting_down" in stream.text.strip().splitlines()[-1]

        fleet.restart("api")
        fleet.add("worker")
        until(is_up, "the API answers again")
        assert [call(number).status_code for number in range(1, len(CALLS))] == [200] * (len(CALLS) - 1)
        assert fleet.redis.zcard("reasoner:jobs") == len(CALLS)
