"""Workers killed, frozen or stopped during a beam search."""

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


def test_a_search_whose_worker_is_killed_continues_elsewhere_without_repetition(
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

    # Journaled results were not requested again; the lost ones were, once.
    assert journaled >= 10
    assert len(asked_before & set(service.slow.asked)) == lost
    assert len(service.slow.asked) == len(set(service.slow.asked))

    # The engine generated only the billed tokens and the lost ones.
    longest = max(node["tokens"] for node in service.get(f"/v1/jobs/{job_id}/tree")["nodes"])
    wasted = service.generated_by_engine() - before - job["usage"]["generated"]
    assert 0 <= wasted <= lost * longest


@pytest.mark.long
def test_a_worker_frozen_past_its_lease_can_change_nothing(service: Service, undisturbed: dict[str, Any]) -> None:
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


@pytest.mark.long
def test_a_deployment_hands_over_a_search_without_using_up_an_attempt(
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


def test_a_running_search_is_cancelled_and_nothing_is_billed_afterwards(service: Service) -> None:
    service.start_workers(1)
    service.start_api()
    job_id = service.submit()
    service.search_is_running(job_id)
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    job = service.ended(job_id)
    assert job["status"] == "cancelled"
    asked = len(service.slow.asked)
    threading.Event().wait(1)  # long enough for another level of the search, which must not happen
    assert len(service.slow.asked) == asked
    assert service.get(f"/v1/jobs/{job_id}") == job
