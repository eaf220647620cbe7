"""``python -m benchmarks.chaos.batch_file``: a batch of a file while processes of every role are killed, in turn.

Prints one JSON document: lines in, lines out, the jobs that ran, what they cost, and the memory of the API processes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos.fleet import ROLES, Fleet
from reasoner.budget.usage import Usage

ENDPOINT = "/v1/jobs"
ENDED = ("completed", "failed", "expired", "cancelled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills; 0 for none")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which the run is given up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run_batch(Path(folder), arguments.lines, arguments.every, limit=arguments.limit), indent=2))


def run_batch(folder: Path, num_lines: int, every: float, *, limit: float) -> dict[str, Any]:
    """Run a batch of ``num_lines``, kill a process each ``every`` seconds, and return what came of it.

    Raises ``TimeoutError`` if it has not ended after ``limit`` seconds.
    """
    started = time.monotonic()
    settings: dict[str, Any] = {"concurrency": 16, "max_attempts": 100}
    with Fleet(folder, workers=2, apis=2, token_seconds=0.001, **settings) as fleet:
        service = _Service(fleet)
        text = "".join(_write_line(number) for number in range(num_lines))
        parts = {"purpose": (None, "batch"), "file": ("lines.jsonl", text.encode())}
        file_id = service.call("POST", "/v1/files", files=parts).json()["id"]
        spec = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        headers = {"Idempotency-Key": "batch"}
        batch_id = service.call("POST", "/v1/batches", json=spec, headers=headers).json()["id"]
        kills: Counter[str] = Counter()
        victims = ((role, number) for turn in itertools.count() for role in ROLES for number in [turn])
        next_kill, memory, pause = time.monotonic() + every, dict[int, int](), threading.Event()
        while (batch := service.call("GET", f"/v1/batches/{batch_id}").json())["status"] not in ENDED:
            if time.monotonic() - started > limit:
                raise TimeoutError(f"after {limit} s: {batch}")
            memory |= {pid: peak for pid in fleet.pids("api") if (peak := _read_peak(pid))}
            if every and time.monotonic() > next_kill:
                role, number = next(victims)
                number %= fleet.count(role)
                fleet.kill(role, number)
                fleet.restart(role, number)
                kills[role] += 1
                next_kill = time.monotonic() + every
            pause.wait(0.5)  # nothing tells of the end, so poll
        results = _read_results(service, batch)
        jobs = fleet.redis.zcard("reasoner:jobs")
    spent = sum(
        (Usage.model_validate(each["response"]["body"]["usage"]) for each in results if each["response"]), Usage()
    )
    ids = [each["custom_id"] for each in results]
    return {
        "status": batch["status"],
        "seconds": round(time.monotonic() - started, 1),
        "kills": dict(kills),
        "lines_in": num_lines,
        "lines_out": len(results),
        "different_ids": len(set(ids)),
        "in_order": ids == sorted(ids, key=int),
        "request_counts": batch["request_counts"],
        "jobs": jobs,
        "tokens_of_lines": spent.total,
        "tokens_of_batch": batch["usage"]["output_tokens"],
        "api_peak_mib": max(memory.values(), default=0) >> 10,
    }


class _Service:
    """The API processes, of which one that answers is asked."""

    def __init__(self, fleet: Fleet) -> None:
        self._bases = itertools.cycle([f"http://127.0.0.1:{port}" for port in fleet.ports])
        self._client = httpx.Client(timeout=60, trust_env=False)
        self._pause = threading.Event()

    def call(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Return the first successful response."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                response = self._client.request(method, next(self._bases) + path, **request)
                if response.is_success:
                    return response
                if response.status_code < 500:
                    raise RuntimeError(response.text)
            self._pause.wait(0.1)


def _write_line(number: int) -> str:
    body = {"problem": f"Question {number}?", "strategy": {"name": "greedy"}, "budget": {"tokens": 500}, "seed": number}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}) + "\n"


def _read_results(service: _Service, batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [result for name in ("output", "error") for result in _read_file(service, batch[f"{name}_file_id"])]


def _read_file(service: _Service, file_id: str | None) -> Iterator[dict[str, Any]]:
    if file_id is not None:
        yield from map(json.loads, service.call("GET", f"/v1/files/{file_id}/content").text.splitlines())


def _read_peak(pid: int) -> int:
    """Return the peak memory of a process in KiB; 0 if it has ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return 0


if __name__ == "__main__":
    main()
