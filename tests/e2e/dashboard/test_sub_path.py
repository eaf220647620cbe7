"""The dashboard below a path of a reverse proxy that strips it, leaves it, or says nothing about it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from playwright.sync_api import Browser, expect
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.e2e.dashboard.service import WAIT, Service, expect_text, open_page
from workers.config.settings import load_settings

PREFIX = "/tools/reasoner"


@contextlib.contextmanager
def reverse_proxy(upstream: str, *, strips: bool) -> Iterator[str]:
    """Serve an upstream below ``PREFIX`` of another port, streams included. Yield the address."""
    client = httpx.AsyncClient(base_url=upstream, timeout=60)

    async def forward(request: Request) -> StreamingResponse:
        path = request.url.path.removeprefix(PREFIX) if strips else request.url.path
        headers = [(name, value) for name, value in request.headers.items() if name != "host"]
        url = httpx.URL(path=path, query=request.url.query.encode())
        sent = client.build_request(request.method, url, headers=headers, content=await request.body())
        sent.headers["host"] = request.headers["host"]
        answer = await client.send(sent, stream=True)
        dropped = ("content-length", "transfer-encoding", "content-encoding")
        kept = {name: value for name, value in answer.headers.items() if name not in dropped}
        return StreamingResponse(
            answer.aiter_bytes(), answer.status_code, kept, background=BackgroundTask(answer.aclose)
        )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    methods = ["GET", "HEAD", "POST", "DELETE"]
    app = Starlette(routes=[Route(PREFIX + "/{path:path}", forward, methods=methods)], lifespan=lifespan)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    ready = threading.Event()
    startup = server.startup

    async def announce(sockets: list[object] | None = None) -> None:
        await startup(sockets)  # type: ignore[arg-type]
        ready.set()

    server.startup = announce  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(60)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.mark.parametrize(
    ("root_path", "strips"), [("", True), (PREFIX, True), (PREFIX, False)], ids=["unnamed", "stripped", "left"]
)
def test_a_job_is_submitted_and_followed_below_the_path_of_a_reverse_proxy(
    browser: Browser, url: str, tmp_path: Path, root_path: str, strips: bool
) -> None:
    settings = load_settings(redis_url=url, data_dir=tmp_path, root_path=root_path)
    with Service(settings) as service, reverse_proxy(service.url, strips=strips) as proxy:
        with open_page(browser, f"{proxy}{PREFIX}/") as page:
            page.click("#first")
            page.fill("#problem", "3 + 4?")
            page.select_option("#strategies", "beam")
            page.fill("#parameters [name=n]", "4")
            page.fill("#parameters [name=expansions]", "2")
            page.click("#form [type=submit]")
            expect_text(page.locator("#state"), "queued")
            job_id = page.url.partition("#")[2]
            service.open_gate()
            service.work(job_id).result(60)
            expect_text(page.locator("#answer .answer"), "7")
            assert page.url == f"{proxy}{PREFIX}/#{job_id}"
            assert page.locator("h1 img").evaluate("image => image.complete && image.naturalWidth > 0")
        with open_page(browser, f"{proxy}{PREFIX}/docs", title="Reasoner: the HTTP interface") as page:
            expect(page.locator(".opblock").first).to_be_visible(timeout=WAIT)
