"""Clients that keep the service busy: each submits jobs in several ways and follows every job to its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from reasoner.jobs.job import TERMINAL_STATUSES

WAYS = ("plain", "key, events", "key, wait", "chat")
"""Ways of a call: a submission with polling; a submission with an idempotency key whose events are followed; and two
calls with a key that wait for the job, at ``/v1/jobs`` and at ``/v1/chat/completions``.
"""
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"name": "greedy"},
    {"name": "self_consistency", "n": 8},
    {"name": "best_of_n", "n": 8},
    {"name": "weighted_vote", "n": 8},
    {"name": "beam", "n": 8, "expansions": 2},
    {"name": "dvts", "n": 8},
    {"name": "rebase", "n": 8},
    {"name": "mcts", "n": 8},
    {"name": "particle", "n": 8},
    {"name": "best_first", "n": 8},
)
_PAUSE = 0.1
_TIMEOUT = httpx.Timeout(90.0)


@dataclass(slots=True)
class Heard:
    """Records of all clients. ``refusals``: number by way, status, and True if ``Retry-After`` was sent."""

    accepted: set[str] = field(default_factory=set)
    """Ids of jobs in successful responses."""
    by_key: dict[str, set[str]] = field(default_factory=dict)
    """Ids in the responses for each idempotency key."""
    refusals: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    broken: int = 0
    """Number of connections that were lost or refused."""
    gaps: int = 0
    """Number of event streams with a missing or repeated event."""


class Crowd:
    """Clients on an event loop in a thread of its own. A context manager, which cancels them at its end."""

    def __init__(self, ports: list[int], model: str, count: int, seed: int) -> None:
        self.heard = Heard()
        self._over = asyncio.Event()
        begun = itertools.count()
        self._clients = [
            Client(ports, model, seed * count + number, begun, self.heard, self._over) for number in range(count)
        ]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)
        self._all: asyncio.Future[Any] | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: all clients have ended
            self._loop.call_soon_threadsafe(self._cut_off)
        self._thread.join()

    def leave(self) -> None:
        """Let all clients finish their current job and then end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over.set)

    @property
    def has_left(self) -> bool:
        """Return True once all clients have ended. Raise a client's unexpected error."""
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _cut_off(self) -> None:
        if self._all is not None:
            self._all.cancel()

    def _run(self) -> None:
        async def run() -> None:
            self._all = asyncio.gather(*(client.run() for client in self._clients))
            await self._all

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(run())
            except asyncio.CancelledError:
                pass
            except Exception as error:
                self._error = error


class Client:
    """A client. ``begun`` numbers the jobs of all clients."""

    def __init__(
        self, ports: list[int], model: str, seed: int, begun: itertools.count[int], heard: Heard, over: asyncio.Event
    ) -> None:
        self._bases = itertools.cycle([f"http://127.0.0.1:{port}" for port in ports])
        self._model = model
        self._rng = random.Random(seed)
        self._begun = begun
        self._heard = heard
        self._over = over

    async def run(self) -> None:
        """Run one job after another until ``leave`` is called, and finish the last one."""
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT) as self._http:
            while not self._over.is_set():
                number = next(self._begun)
                way = WAYS[number % len(WAYS)]
                await (self._chat(number) if way == "chat" else self._job(way, number))

    async def _job(self, way: str, number: int) -> None:
        key = f"chaos {number}"
        headers = {} if way == "plain" else {"Idempotency-Key": key}
        if way == "key, wait":
            headers["Prefer"] = "wait=20"
        answer = await self._call(way, "POST", "/v1/jobs", json=self._spec(number), headers=headers)
        job = answer.json()
        self._note(job["id"], None if way == "plain" else key)
        if way == "key, events":
            await self._follow(way, job["id"])
        while job["status"] not in TERMINAL_STATUSES:
            job = (await self._call(way, "GET", f"/v1/jobs/{job['id']}", params={"wait": 20})).json()

    async def _chat(self, number: int) -> None:
        spec = self._spec(number)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": spec["problem"]}],
            "strategy": spec["strategy"],
            "budget": spec["budget"],
            "seed": number,
        }
        key = f"chaos {number}"
        headers = {"Idempotency-Key": key}
        answer = await self._call("chat", "POST", "/v1/chat/completions", json=body, headers=headers)
        self._heard.by_key.setdefault(key, set()).add(answer.json()["id"])

    def _spec(self, number: int) -> dict[str, Any]:
        numbers = ", ".join(str(self._rng.randint(2, 12)) for _ in range(4))
        return {
            "problem": f"Use the numbers {numbers} to make {self._rng.randint(20, 60)}.",
            "strategy": STRATEGIES[number // len(WAYS) % len(STRATEGIES)],
            "budget": {"tokens": 2000},
            "seed": number,
            "priority": ("interactive", "batch")[number % 2],
        }

    def _note(self, job_id: str, key: str | None) -> None:
        self._heard.accepted.add(job_id)
        if key is not None:
            self._heard.by_key.setdefault(key, set()).add(job_id)

    async def _call(self, way: str, method: str, path: str, **request: Any) -> httpx.Response:
        """Return the first successful response."""
        while True:
            try:
                answer = await self._http.request(method, next(self._bases) + path, **request)
            except httpx.TransportError:
                self._heard.broken += 1
            else:
                if answer.is_success:
                    return answer
                self._refused(way, answer)
            await asyncio.sleep(_PAUSE)

    def _refused(self, way: str, answer: httpx.Response) -> None:
        self._heard.refusals[way, answer.status_code, "retry-after" in answer.headers] += 1

    async def _follow(self, way: str, job_id: str) -> None:
        """Read a job's events to its end, reconnecting as often as needed."""
        newest, kind = 0, ""
        while kind.removeprefix("job.") not in TERMINAL_STATUSES:
            url = f"{next(self._bases)}/v1/jobs/{job_id}/events"
            try:
                async with self._http.stream("GET", url, params={"starting_after": newest}) as answer:
                    if answer.status_code == httpx.codes.NO_CONTENT:
                        return
                    if not answer.is_success:
                        self._refused(way, answer)
                    async for line in answer.aiter_lines():
                        if line.startswith("data:") and answer.is_success:
                            event = json.loads(line.removeprefix("data:"))
                            self._heard.gaps += event["seq"] != newest + 1
                            newest, kind = event["seq"], event["type"]
            except httpx.TransportError:
                self._heard.broken += 1
            await asyncio.sleep(_PAUSE)
