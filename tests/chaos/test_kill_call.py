"""A worker killed while a solution's Python runs: the search ends as if undisturbed, and what ran runs no more."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reasoner.evaluation.suites.registry import open_suite
from tests.chaos import processes
from tests.chaos.conftest import Service, same
from tests.chaos.slow_engine import SlowEngine
from workers.config.settings import load_settings

MODEL = "policy-python"
MAX_WAIT_MILLISECONDS = 60_000

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]


@pytest.fixture(scope="module")
def calling_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowEngine]:
    folder = tmp_path_factory.mktemp("engine")
    socket = folder / "engine.sock"
    with (
        processes.engine(load_settings(model=MODEL), socket, folder / "engine.log"),
        SlowEngine(folder / "slow.sock", socket, seconds=0.2) as slow,
    ):
        processes.until(socket.exists, "the engine listens")
        yield slow


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    [*_, problem] = open_suite("arithmetic", limit=4).problems
    search = {"strategy": {"name": "self_consistency", "n": 8}, "verifier": None, "deterministic": True}
    return {"problem": problem.text, "model": MODEL, "tools": [{"type": "python"}], "seed": 11} | search


@contextlib.contextmanager
def running(folder: Path, engine: SlowEngine, workers: int) -> Iterator[Service]:
    with contextlib.ExitStack() as stack:
        service = Service(folder, engine, stack, model=MODEL)
        service.start_workers(workers)
        service.start_api()
        yield service


def stop_in_call(service: Service, job_id: str) -> int:
    """Stop the worker while a call runs whose output is not in the journal, and return its process id."""
    last = "0"
    waiting: set[str] = set()
    while True:
        answer: Any = service.redis.xread({f"reasoner:job:{job_id}:log": last}, block=MAX_WAIT_MILLISECONDS)
        assert answer, "no call came"
        for last, fields in answer[0][1]:  # noqa: B007
            data = json.loads(fields["data"])
            assert "result" not in data, "the search ended before a call could be interrupted"
            if data.get("calling"):
                waiting.add(data["node"])
            elif "call_ended" in data:
                waiting.discard(data["node"])
        if waiting:
            worker = service.holder(job_id)
            os.kill(worker, signal.SIGSTOP)
            later = service.redis.xrange(f"reasoner:job:{job_id}:log", min=f"({last}")
            outputs = {json.loads(fields["data"])["node"] for _, fields in later if "call_ended" in fields["data"]}
            if waiting - outputs:
                return worker
            os.kill(worker, signal.SIGCONT)


def count_outputs(service: Service, job_id: str) -> int:
    return sum("call_ended" in json.loads(entry["data"]) for entry in service.nodes(job_id))


def test_a_search_whose_worker_is_killed_in_a_call_ends_as_if_undisturbed(
    tmp_path: Path, calling_engine: SlowEngine, job: dict[str, Any]
) -> None:
    with running(tmp_path / "undisturbed", calling_engine, 1) as service:
        undisturbed = service.ended(service.submit(job))
    assert undisturbed["usage"]["tool_calls"] >= 8
    with running(tmp_path / "killed", calling_engine, 2) as service:
        job_id = service.submit(job)
        victim = stop_in_call(service, job_id)
        journaled = count_outputs(service, job_id)
        os.kill(victim, signal.SIGKILL)
        service.workers[victim].wait()
        ended = service.ended(job_id)  # which checks that no key is in the journal twice
        assert count_outputs(service, job_id) == ended["usage"]["tool_calls"]
    assert journaled < ended["usage"]["tool_calls"] == undisturbed["usage"]["tool_calls"]
    assert ended["attempt"] == 2
    assert same(ended["result"], undisturbed["result"])
    assert ended["result"]["answer"] is not None
