"""Memory of an export of many jobs: the API's process and the command's.

python -m benchmarks.service.export_memory [JOBS [FORMAT ...]]

It fills a broker with jobs of eight solutions, whose tokens and log-probabilities are recorded, exports them in every
format (or these) and kind of file, and prints the peak of the resident memory of both processes: of the API's so far,
of the command's by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from reasoner.admission.resolve import resolve_program_job
from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import Entry
from reasoner.jobs.request import JobRequest
from reasoner.training_data.formats import FORMATS
from workers.broker.embedded import EmbeddedBroker
from workers.store.jobs import JobStore

JOBS = 10_000
SOLUTIONS, TOKENS = 8, 100
PORT = 8931
CONCURRENT = 32
START_SECONDS = 60.0
REQUEST = JobRequest(problem="Reach 24 from 4, 6, 8 and 12.", strategy={"name": "best_of_n"}, record_logprobs=True)


async def fill(store: JobStore, jobs: int) -> None:
    """Store jobs that have ended, as workers do."""
    spec = resolve_program_job(REQUEST).model_dump()
    waiting = asyncio.Semaphore(CONCURRENT)

    async def run(number: int) -> None:
        async with waiting:
            job, _ = await store.submit(spec, owner="local", queue_cap=2 * CONCURRENT)
            claim = await store.claim(job["id"], lease=60, max_attempts=3, worker="benchmark")
            assert claim is not None
            await store.commit(claim, make_journal(number))
            result = JobResult(answer="24", text="24", confidence=0.9, finish_reason="answer", node="0")
            await store.finish(claim, "completed", result=result)

    await asyncio.gather(*map(run, range(jobs)))


def make_journal(number: int) -> list[Entry]:
    prompt = {"node": "", "token_ids": list(range(40)), "batch": 0}
    entries = [Entry("prompt:", "prompt", prompt, Usage(), 0.0)]
    for index in range(SOLUTIONS):
        ids = [(number * 31 + index * 7 + at) % 50_000 for at in range(TOKENS)]
        answer = "24" if index % 2 == 0 else "23"
        node = {
            **{"node": str(index), "parent": "", "part": 0, "token_ids": ids, "tokens": TOKENS, "cached": 40},
            **{"text": f"{number} word " * (TOKENS // 2) + answer, "logprob": -50.0, "final": True, "reason": "stop"},
            **{"answer": answer, "batch": index, "logprobs": [-(token % 997) / 1000 for token in ids]},
        }
        score = {"node": str(index), "scores": [0.9 - index / 10], "score": 0.9 - index / 10}
        score |= {"computed": TOKENS, "cached": 40, "batch": index}
        entries.append(Entry(f"complete:{index}:0", "node", node, Usage(generated=TOKENS), 0.1))
        entries.append(Entry(f"score:{index}:0", "score", score, Usage(), 0.1))
    return entries


def read_peak(pid: int) -> float:
    """Return the peak of a process's resident memory in MiB."""
    match = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def run_command(arguments: list[str], environment: dict[str, str]) -> float:
    """Run ``reasoner`` and return the peak of its resident memory in MiB."""
    child = subprocess.Popen(
        [sys.executable, "-m", "api.cli.main", *arguments], env=environment, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, arguments
    return usage.ru_maxrss / 1024


def export_all(
    url: str, folder: Path, environment: dict[str, str], *, jobs: int, formats: Sequence[str], pid: int
) -> None:
    """Export in every way, and print a line for each. ``pid``: the API's process."""
    print(f"{'export':<24}{'rows':>9}{'MB':>8}{'seconds':>9}{'API MiB':>9}{'command MiB':>13}")
    for format in formats:
        for file in ("jsonl", "parquet"):
            begun, size = time.monotonic(), 0
            with httpx.stream("GET", f"{url}/v1/jobs/export?format={format}&file={file}", timeout=600) as response:
                size = sum(map(len, response.iter_raw()))
            seconds = time.monotonic() - begun
            out = folder / f"{format}.{file}"
            peak = run_command(
                ["export", "--url", url, "--format", format, "--file", file, "--out", str(out)], environment
            )
            rows = count_jobs(out, jobs)
            figures = f"{rows:>9}{size / 1e6:>8.1f}{seconds:>9.1f}{read_peak(pid):>9.0f}{peak:>13.0f}"
            print(f"{format + ' ' + file:<24}{figures}", flush=True)


def count_jobs(out: Path, jobs: int) -> int:
    """Return the number of rows, and check that every job is there once."""
    if out.is_dir():
        import pyarrow.parquet

        parts = [pyarrow.parquet.read_table(part, columns=["job"]) for part in sorted(out.glob("*.parquet"))]
        names = [name for part in parts for name in part["job"].to_pylist()]
    else:
        with out.open() as lines:
            names = [json.loads(line)["job"] for line in lines]
    runs = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert len(runs) == len(set(runs)) == jobs, f"{len(set(runs))} jobs of {jobs}, in {len(runs)} runs of rows"
    return len(names)


async def prepare(url: str, jobs: int) -> None:
    store = JobStore(url, retry_seconds=60.0)  # a busy machine is not an outage
    try:
        await fill(store, jobs)
    finally:
        await store.close()


def main() -> None:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else JOBS
    with tempfile.TemporaryDirectory() as name, EmbeddedBroker(Path(name)) as broker:
        asyncio.run(prepare(broker.url, jobs))
        environment = os.environ | {"REASONER_REDIS_URL": broker.url, "REASONER_ENGINE_URL": "http://127.0.0.1:9"}
        command = [sys.executable, "-m", "api.cli.main", "api", "--port", str(PORT)]
        silent = subprocess.DEVNULL
        api = subprocess.Popen(command, env=environment, stdout=silent, stderr=silent)
        try:
            url = f"http://127.0.0.1:{PORT}"
            wait_until_live(url)
            print(f"{jobs} jobs; the API's process has {read_peak(api.pid):.0f} MiB before")
            export_all(url, Path(name), environment, jobs=jobs, formats=sys.argv[2:] or [*FORMATS], pid=api.pid)
        finally:
            api.terminate()
            api.wait()


def wait_until_live(url: str) -> None:
    """Wait until the API answers."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            httpx.get(f"{url}/healthz", timeout=2)
        except httpx.TransportError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the API has not started")


if __name__ == "__main__":
    main()
