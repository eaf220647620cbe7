"""Workers that are killed, frozen or stopped in the middle of a beam search."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from tests.chaos.conftest import Service, same

RECOVERY_SECONDS = 10.0

pytestmark = pytest.mark.timeout(240)


def test_a_search_whose_worker_is_killed_goes_on_elsewhere_and_repeats_nothing(
    service: Service, undisturbed: dict[str, Any]
) -> None:
    service.start_workers(2)
    service.start_api()
    service.slow.asked.clear()
    before = service.generated_by_engine()
    job_id = service.submit()
    victim = service.search_is_running(job_id)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.time()
    service.workers[victim].wait()
    journaled, asked_before = len(service.nodes(job_id)), set(service.slow.asked)
    lost = len(asked_before) - journaled
    service.slow.asked.clear()

    job = service.ended(job_id)
    assert same(job["result"], undisturbed)
    assert job["attempt"] == 2
    assert service.holder(job_id) in set(service.workers) - {victim}
    assert 0 < float(service.event(job_id, "job.resumed")["at"]) - killed_at < RECOVERY_SECONDS

    # Nothing that the journal held was asked for again; what was lost on the way was, once.
    assert journaled >= 10
    assert len(asked_before & set(service.slow.asked)) == lost
    assert len(service.slow.asked) == len(set(service.slow.asked))

    # The engine made no more tokens than are on the bill, but for those that were lost.
    longest = max(node["tokens"] for node in service.get(f"/v1/jobs/{job_id}/tree")["nodes"])
    wasted = service.generated_by_engine() - before - job["usage"]["generated"]
    assert 0 <= wasted <= lost * longest


def test_a_worker_that_was_frozen_past_its_lease_can_change_nothing(
    service: Service, undisturbed: dict[str, Any]
) -> None:
    service.start_workers(2)
    service.start_api()
    job_id = service.submit()
    zombie = service.search_is_running(job_id)
    os.kill(zombie, signal.SIGSTOP)
    service.event(job_id, "job.resumed")
    os.kill(zombie, signal.SIGCONT)
    job = service.ended(job_id)
    assert same(job["result"], undisturbed)
    assert job["attempt"] == 2
    assert service.workers[zombie].poll() is None


def test_a_deploy_hands_a_search_over_without_using_up_an_attempt(
    service: Service, undisturbed: dict[str, Any]
) -> None:
    service.start_workers(2)
    service.start_api()
    job_id = service.submit()
    leaving = service.search_is_running(job_id)
    os.kill(leaving, signal.SIGTERM)
    assert service.workers[leaving].wait(30) == 0
    job = service.ended(job_id)
    assert same(job["result"], undisturbed)
    assert job["attempt"] == 1
    assert service.holder(job_id) != leaving


def test_a_running_search_is_cancelled_and_nothing_is_charged_afterwards(service: Service) -> None:
    service.start_workers(1)
    service.start_api()
    job_id = service.submit()
    service.search_is_running(job_id)
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    job = service.ended(job_id)
    assert job["status"] == "cancelled"
    asked = len(service.slow.asked)
    threading.Event().wait(1)  # nothing is to happen: long enough for another level, if there were one
    assert len(service.slow.asked) == asked
    assert service.get(f"/v1/jobs/{job_id}") == job
