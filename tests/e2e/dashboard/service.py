"""The service for the dashboard's tests: the application on a port with a worker, and helpers for a page in the
browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
import uvicorn
from playwright.sync_api import Browser, Page, expect

from api.app.app import create_app
from reasoner.run import run_job
from tests.planned import Planned, PlannedEngine
from workers.config.settings import Settings
from workers.execution.claim_queue import ClaimQueue
from workers.execution.execute import execute
from workers.execution.leases import Leases
from workers.store.jobs import JobStore

WAIT = 40_000.0
"""Milliseconds after which something missing on the page fails the test."""
INJECTION = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
PLAN = {
    (0,): Planned("3 + 4 = 7\n\n", 0.3),
    (1,): Planned(f"{INJECTION}\n\n", 0.8),
    (2,): Planned("2 * 5 = 10\n\n", 0.6),
    (3,): Planned("who knows\n\n", 0.1),
    (1, 0): Planned("so \\boxed{7}", 0.9),
    (2, 0): Planned("so \\boxed{10}", 0.4),
}
"""Planned branches: a beam of width 2 keeps 1 and 2, and chooses 1.0."""
JOB = {"problem": "3 + 4?", "strategy": {"name": "beam", "n": 4, "expansions": 2}, "budget": {"tokens": 500}, "seed": 1}


class Engine(PlannedEngine):
    """An engine whose branch 1.0 waits for ``gate``; an abort opens it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        super().__init__(PLAN, {(1, 0): self.gate})

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        self.gate.set()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class Service:
    """The application on a port, and a worker that runs a job on request, both in the event loop of one thread."""

    def __init__(self, settings: Settings, engine: Any = None) -> None:
        self.engine = engine or Engine()
        app = create_app(settings, self.engine)
        self._server = _Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Service:
        self._thread.start()
        assert self._server.ready.wait(60)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        # The first answer builds all schemas. On a busy machine that may take longer than the page waits for one.
        keys = [key.get_secret_value() for key in self._settings.api_keys]
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        httpx.get(self.url + "/v1/strategies", headers=headers, timeout=60).raise_for_status()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def work(self, job_id: str) -> Future[None]:
        """Run a job as a worker does."""

        async def run() -> None:
            store = JobStore(str(self._settings.redis_url))
            try:
                await execute(
                    job_id,
                    store=store,
                    engine=self.engine,
                    run=run_job,
                    shutting_down=asyncio.Event(),
                    leases=Leases(store, 0.6),
                    claims=ClaimQueue(store, lease=0.6, max_attempts=3),
                )
            finally:
                await store.close()

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def open_gate(self) -> None:
        self._loop.call_soon_threadsafe(self.engine.gate.set)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=30).raise_for_status().json()

    def submit(self, **more: Any) -> str:
        return str(httpx.post(f"{self.url}/v1/jobs", json=JOB | more, timeout=30).raise_for_status().json()["id"])

    def events(self, job_id: str) -> list[dict[str, Any]]:
        lines = httpx.get(f"{self.url}/v1/jobs/{job_id}/events", timeout=30).text.splitlines()
        return [json.loads(line[5:]) for line in lines if line.startswith("data:")]


def billed_tokens(events: Sequence[dict[str, Any]]) -> int:
    """Return the tokens that these events add to the bill."""
    return round(
        sum(event["spend"].get("generated", 0) + event["spend"].get("verifier_computed", 0) for event in events)
    )


@contextlib.contextmanager
def open_page(
    browser: Browser,
    address: str,
    *,
    width: int = 1440,
    height: int = 900,
    dark: bool = False,
    title: str = "Reasoner",
) -> Iterator[Page]:
    """Open the page; fail if it raised an error, violated its content security policy, or called other hosts."""
    errors: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if "Content Security Policy" in message.text else None
    )
    origin = "/".join(address.split("/")[:3])
    foreign_requests: list[str] = []
    page.on(
        "request",
        lambda request: None if request.url.startswith((origin, "data:")) else foreign_requests.append(request.url),
    )
    page.goto(address)
    yield page
    assert (errors, foreign_requests) == ([], []), (errors, foreign_requests)
    assert page.title() == title
    context.close()


def drawn_nodes(page: Page, kind: str = "") -> Any:
    """Return the drawn branches."""
    return page.locator(f"#canvas .node{kind}:visible")


def expect_text(locator: Any, text: str | re.Pattern[str]) -> None:
    expect(locator).to_have_text(text, timeout=WAIT)


def expect_count(locator: Any, count: int) -> None:
    expect(locator).to_have_count(count, timeout=WAIT)


def overflowing_elements(page: Page) -> Any:
    """Return the elements that reach beyond the right edge of the window."""
    return page.evaluate(
        "[...document.querySelectorAll('body *')].map(e => [e, e.getBoundingClientRect()])"
        ".filter(([e, box]) => box.right > innerWidth + 0.5 && !e.closest('svg')).map(([e]) => e.outerHTML)"
    )
