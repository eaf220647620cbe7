"""The service behind a proxy and in a browser: sub-path, CORS, compressed bodies, ``Host``, idle connections."""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
import structlog

from api.roles import serve
from tests.api.conftest import serving
from tests.chaos.processes import alive, until
from tests.scripted import ScriptedEngine
from workers.broker.embedded import EmbeddedBroker
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError
from workers.processes.files import QUIET_SECONDS, AcceptErrorHandler, raise_file_limit

JOB = {"problem": "1 + 1?"}
ORIGIN = "https://app.example"


@pytest.mark.parametrize("is_stripped", [True, False], ids=["the proxy strips it", "the proxy leaves it"])
@pytest.mark.parametrize("root_path", ["/reasoner", "/a/b", "/reasoner/"])
async def test_every_kind_of_route_works_below_a_path(settings: Settings, root_path: str, is_stripped: bool) -> None:
    below = load_settings(redis_url=settings.redis_url, data_dir=settings.data_dir, root_path=root_path)
    root = root_path.rstrip("/")
    prefix = "" if is_stripped else root
    async with serving(below, ScriptedEngine()) as client:
        made = await client.post(f"{prefix}/v1/jobs", json=JOB)
        assert (made.status_code, made.headers["location"]) == (202, f"{root}/v1/jobs/{made.json()['id']}")
        assert made.headers["cache-control"] == "no-store"
        assert (await client.get(f"{prefix}/v1/jobs/{made.json()['id']}")).status_code == 200
        assert (await client.get(f"{prefix}/readyz")).status_code == 200
        assert "error" in (await client.post(f"{prefix}/v1/chat/completions", json={})).json()
        assert (await client.get(f"{prefix}/v1/jobs?unknown=1")).status_code == 422
        assert (await client.get(f"{prefix}/openapi.json")).json()["servers"] == [{"url": root}]
        for page in ("/", "/docs"):
            links = re.findall(r'(?:src|href)="([^"]+)"', (await client.get(prefix + page)).text)
            assert links
            for link in links:
                address = urljoin(f"{root}{page}", link)
                assert address.startswith(f"{root}/")
                assert (await client.get(prefix + address.removeprefix(root))).status_code == 200, link
        if not is_stripped:
            moved = await client.get(root)
            assert (moved.status_code, moved.headers["location"]) == (308, f"{root}/")
            assert (await client.get(f"{root}x/v1/jobs")).status_code == 404


@pytest.mark.parametrize("root_path", ["reasoner", "/v1", "/docs/x", "/a b", "https://h/x", "/a//b", "/é"])
def test_a_path_that_cannot_work_is_refused(root_path: str) -> None:
    with pytest.raises(ConfigError, match="root-path"):
        load_settings(root_path=root_path)


def preflight(origin: str) -> dict[str, str]:
    asked = "authorization,content-type,idempotency-key"
    return {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}


async def test_pages_of_configured_origins_alone_may_call_the_api(settings: Settings) -> None:
    key = "a-key-of-many-characters"
    changes = {"redis_url": settings.redis_url, "data_dir": settings.data_dir, "api_keys": key}
    async with serving(load_settings(**changes, cors_origins=f"{ORIGIN},https://b.example:8443")) as client:
        allowed = await client.options("/v1/jobs", headers=preflight(ORIGIN))
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "idempotency-key" in allowed.headers["access-control-allow-headers"].lower()
        foreign = await client.options("/v1/jobs", headers=preflight("https://evil.example"))
        assert "access-control-allow-origin" not in foreign.headers
        refused = await client.get("/v1/jobs", headers={"Origin": ORIGIN})  # the page must be able to read why
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        assert "access-control-allow-credentials" not in refused.headers


async def test_without_the_setting_no_page_may_call_the_api(client: httpx.AsyncClient) -> None:
    for response in (
        await client.options("/v1/jobs", headers=preflight(ORIGIN)),
        await client.get("/v1/jobs", headers={"Origin": ORIGIN}),
    ):
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://App.example", "null"])
def test_an_invalid_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors-origins"):
        load_settings(cors_origins=origin)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, identity"])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/chat/completions", "/v1/responses", "/v1/batches"])
async def test_a_compressed_body_is_refused_with_415(client: httpx.AsyncClient, path: str, encoding: str) -> None:
    body = gzip.compress(b'{"problem": "1 + 1?"}')
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    response = await client.post(path, content=body, headers=headers)
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    assert "without Content-Encoding" in response.text


async def test_the_encoding_identity_is_none(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/jobs", json=JOB, headers={"Content-Encoding": "identity"})).status_code == 202


@pytest.mark.parametrize("host", ["LOCALHOST", "LocalHost:8000", "localhost.", "[::1]:8000"])
async def test_the_host_of_this_machine_has_any_case(client: httpx.AsyncClient, host: str) -> None:
    assert (await client.get("/v1/jobs", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(("given", "seconds"), [({}, 75), ({"keep_alive_seconds": 120}, 120)])
def test_idle_connections_are_kept_as_long_as_set(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, given: dict[str, Any], seconds: int
) -> None:
    configs: list[Any] = []

    class Recorded:
        started = True

        def __init__(self, config: Any, _: object) -> None:
            configs.append(config)

        def run(self) -> None:
            pass

    monkeypatch.setattr(serve, "Server", Recorded)
    monkeypatch.setattr(serve, "configure_logging", lambda: None)
    serve.run_api(load_settings(redis_url=settings.redis_url, data_dir=settings.data_dir, **given))
    assert configs[0].timeout_keep_alive == seconds


def test_the_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_that_cannot_be_accepted_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("workers.processes.files.time.monotonic", lambda: now)
    handler, loop = AcceptErrorHandler(), asyncio.new_event_loop()
    others: list[Any] = []
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    monkeypatch.setattr(loop, "default_exception_handler", others.append)
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            handler(loop, context)
            now += 1.0
        assert [entry["event"] for entry in logs] == ["connections are not accepted"]
        now += QUIET_SECONDS
        handler(loop, context)
        assert len(logs) == 2
    handler(loop, {"message": "another"})
    assert others == [{"message": "another"}]
    loop.close()


def test_the_embedded_broker_outlasts_a_stop_of_the_whole_group(tmp_path: Path) -> None:
    """A service manager sends SIGTERM to all processes at once; the broker ends with the one that started it."""
    with EmbeddedBroker(tmp_path) as broker:
        assert broker.process is not None
        server = broker.process.pid
        broker.process.send_signal(signal.SIGTERM)
        with EmbeddedBroker(tmp_path) as guest:  # it answers
            assert guest.process is None
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not alive(server)


async def test_pages_of_others_cannot_upload_to_a_service_without_keys(client: httpx.AsyncClient) -> None:
    """Browsers send forms of any page without asking."""
    form: Any = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    refused = await client.post("/v1/files", headers={"Origin": "https://evil.example"}, **form)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden_origin")
    own = await client.post("/v1/files", headers={"Origin": "http://127.0.0.1"}, **form)
    assert own.status_code == 200


def test_the_embedded_broker_ends_in_order_when_its_starter_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, threading; from pathlib import Path; from workers.broker.embedded import EmbeddedBroker\n"
        "broker = EmbeddedBroker(Path(sys.argv[1])); broker.start(); print(broker.process.pid, flush=True)\n"
        "threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        parent.kill()
    until(lambda: not alive(server), "the broker is gone", seconds=20)
    assert "ready to exit" in (tmp_path / "broker" / "server.log").read_text()
