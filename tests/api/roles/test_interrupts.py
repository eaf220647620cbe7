"""Ctrl-C ends every command that waits for the service with the same exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from api.http.metrics import HTTP_REQUESTS, HTTP_STREAMS
from tests.api.openai_client import address
from tests.specs import build_spec
from workers.store.jobs import JobStore

__all__ = ["address"]

POLLED = ("GET", "/v1/batches/{batch_id}", "200")


def seen() -> float:
    """Return the number of opened event streams and polls of batches, the two ways in which commands wait."""
    return float(HTTP_STREAMS._value.get() + HTTP_REQUESTS.labels(*POLLED)._value.get())


@pytest.mark.parametrize(
    ("arguments", "cancels"),
    [(["solve", "1 + 1?"], True), (["jobs", "watch", "JOB"], False), (["batch", "submit", "FILE", "--wait"], False)],
)
async def test_ctrl_c_ends_a_command_that_waits_with_130(
    address: str, store: JobStore, tmp_path: Path, arguments: list[str], cancels: bool
) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"problem": "1 + 1?"}\n')
    if "JOB" in arguments:
        spec = build_spec(problem="1 + 1?", budget={"tokens": 10}, strategy={"name": "greedy"}).model_dump()
        job, _ = await store.submit(spec, owner="local", queue_cap=5)
        arguments = [job["id"] if word == "JOB" else word for word in arguments]
    if "FILE" in arguments:
        arguments = [*(str(file) if word == "FILE" else word for word in arguments), "--tokens", "100"]
    before = seen()
    command = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "api.cli.main",
        *arguments,
        "--url",
        address,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "120"},
    )
    async with asyncio.timeout(60):
        while seen() == before:
            await asyncio.wait(
                {asyncio.ensure_future(command.wait())}, timeout=0.02
            )  # nothing signals a request, so poll
            assert command.returncode is None
        command.send_signal(signal.SIGINT)
        _, errors = await command.communicate()
    assert command.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    [left] = (await store.list_jobs(owner=None, after=None, limit=2)).jobs
    assert (left["status"] == "cancelled") == cancels
