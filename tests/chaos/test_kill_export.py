"""An export that is killed in the middle, again and again, and resumed is the one that nobody disturbed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from api.routes import export as export_module
from tests.api.conftest import settings, work
from tests.api.openai_client import listening
from tests.long import mostly_long
from tests.specs import build_spec
from tests.workers.fixtures import broker, store, url
from workers.config.settings import Settings
from workers.store.jobs import JobStore

__all__ = ["broker", "settings", "store", "url", "work"]

NUM_JOBS = 14
KILLS = (3, 1, 4)
"""Numbers of jobs that an export gets before it is killed."""

pytestmark = pytest.mark.timeout(240)


class Gate:
    """Lets a number of jobs pass to an export, and then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: int | None = None
        self._is_closed = asyncio.Event()
        read = export_module._read_job

        async def read_or_wait(*arguments: Any) -> Any:
            if self._left == 0:
                self._is_closed.set()
                await asyncio.Event().wait()
            if self._left is not None:
                self._left -= 1
            return await read(*arguments)

        monkeypatch.setattr(export_module, "_read_job", read_or_wait)

    def open(self, num_jobs: int | None) -> None:
        """Let so many jobs pass; all of them with ``None``."""
        self._left = num_jobs
        self._is_closed.clear()

    async def until_closed(self) -> None:
        await self._is_closed.wait()


def read_rows(out: Path) -> list[Any]:
    """Return the rows of an export: lines, or those of Parquet parts."""
    if out.is_file():
        return out.read_bytes().splitlines(keepends=True)
    return [row for part in sorted(out.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]


@pytest.mark.parametrize(
    "options",
    mostly_long(
        ["--format rollouts", "--format jobs", "--format tree", "--format sft --file parquet"],
        every=3,
    ),
)
async def test_an_export_that_is_killed_and_resumed_is_the_undisturbed_one(
    settings: Settings,
    store: JobStore,
    work: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
) -> None:
    for seed in range(NUM_JOBS):
        strategy = {"name": "self_consistency", "n": 6}
        spec = build_spec({"problem": "1 + 1?", "strategy": strategy, "seed": seed, "record_logprobs": True})
        job, _ = await store.submit(spec.model_dump(), owner="local", queue_cap=NUM_JOBS)
        await work(job["id"])
    gate = Gate(monkeypatch)
    async with listening(settings) as address:

        async def start(out: Path, *more: str) -> asyncio.subprocess.Process:
            command = (sys.executable, "-m", "api.cli.main", "export", "--url", address, *options.split())
            return await asyncio.create_subprocess_exec(
                *command, "--out", str(out), *more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )

        whole, killed = tmp_path / "whole", tmp_path / "killed"
        gate.open(None)
        undisturbed = await start(whole)
        output, _ = await undisturbed.communicate()
        assert undisturbed.returncode == 0, output.decode()
        for number, num_jobs in enumerate(KILLS):
            gate.open(num_jobs)
            running = await start(killed, *(["--resume"] if number else []))
            closed = asyncio.create_task(gate.until_closed())
            await asyncio.wait({closed, ended := asyncio.create_task(running.wait())}, return_when="FIRST_COMPLETED")
            assert not ended.done(), (await running.communicate())[0].decode()
            running.kill()
            await running.communicate()
        assert len(read_rows(killed)) < len(read_rows(whole))
        gate.open(None)
        resumed = await start(killed, "--resume")
        output, _ = await resumed.communicate()
        assert resumed.returncode == 0, output.decode()
    rows = read_rows(killed)
    assert rows == read_rows(whole)
    assert len(rows) >= NUM_JOBS
