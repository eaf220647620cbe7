"""Two engines, one of which falls silent or dies during a search."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from engine.remote.failover import choose_by_rendezvous
from tests.chaos.conftest import Service, same
from tests.chaos.processes import engine, until
from tests.chaos.slow_engine import SlowEngine
from tests.long import mostly_long
from workers.config.settings import load_settings

RECOVERY_SECONDS = 10.0

pytestmark = pytest.mark.timeout(300)


def states(service: Service) -> dict[str, str]:
    return {known["engine"]: known["state"] for known in service.get("/readyz")["engines"]}


def job_at(home: str, urls: tuple[str, ...], service: Service) -> str:
    """Submit a job that runs on this engine as long as it answers."""
    while choose_by_rendezvous(urls, job_id := service.submit()) != home:
        service.client.post(f"/v1/jobs/{job_id}/cancel")
    return job_id


@pytest.mark.parametrize("how", mostly_long([signal.SIGKILL, signal.SIGSTOP], every=2))
def test_a_search_continues_on_another_engine_when_its_own_falls_silent_or_is_killed(
    service: Service, undisturbed: dict[str, Any], tmp_path: Path, how: signal.Signals
) -> None:
    socket, elsewhere = tmp_path / "engine.sock", service.slow
    elsewhere.asked.clear()
    with (
        engine(load_settings(), socket, tmp_path / "engine.log") as victim,
        SlowEngine(tmp_path / "slow.sock", socket, seconds=0.3) as home,
    ):
        urls = (home.url, elsewhere.url)
        service.settings = service.settings.model_copy(update={"engine_url": urls})
        service.start_api()
        until(lambda: set(states(service).values()) == {"up"}, "both engines answer")
        job_id = job_at(home.url, urls, service)
        service.start_workers(1)
        service.search_is_running(job_id)
        assert not elsewhere.asked
        os.kill(victim.pid, how)
        struck_at, arrived = time.time(), len(service.nodes(job_id))
        job = service.ended(job_id)
        assert same(job["result"], undisturbed)
        assert job["attempt"] == 1
        assert not [entry for entry in service.log(job_id) if "engine_unavailable" in entry["data"]]

        # Results that had arrived were not requested again; the others were, once.
        moved = set(home.asked) & set(elsewhere.asked)
        assert len(moved) <= len(home.asked) - arrived
        assert len(elsewhere.asked) == len(set(elsewhere.asked))
        until(lambda: states(service) == {home.url: "away", elsewhere.url: "up"}, "the API knows which is away")
        if how == signal.SIGSTOP:
            os.kill(victim.pid, signal.SIGCONT)
            until(lambda: set(states(service).values()) == {"up"}, "it is back")
        else:
            later = [float(entry["at"]) for entry in service.nodes(job_id)[arrived:]]
            assert later[0] - struck_at < RECOVERY_SECONDS
