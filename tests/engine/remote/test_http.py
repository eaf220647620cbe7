"""The HTTP client against servers that break connections, send invalid responses or are unreachable."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.protocol.types import (
    Branch,
    Completion,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    TokenizeRequest,
)
from engine.remote.http import HttpEngine
from engine.remote.proxies import get_ssl_context
from tests.engine.helpers import generate

REQUEST = generate((5, 6), [Branch(1, 1, 4)])
COMPLETION = Completion(0, (7, 8), "ab", "length", None, -1.5, 2, 0)

Answer = Callable[[int], bytes | None]
"""Returns the server's response on its n-th connection before it disconnects; ``None`` for no response at all."""


@pytest.fixture(autouse=True)
def _no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.remote.retries._CONNECTION_WAITS_SECONDS", (0.0, 0.0))


@asynccontextmanager
async def scripted(folder: Path, answer: Answer) -> AsyncIterator[HttpEngine]:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        reply = answer(connections)
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
        writer.write(reply or b"")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, folder / "s")
    client = HttpEngine(f"unix://{folder / 's'}", dialect="reasoner")
    async with server:
        yield client
        await client.close()


def response(body: bytes, status: str = "200 OK", *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode() + body


def events(*objects: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(value)}\n\n" for value in objects] + ["data: [DONE]\n\n"] * done
    return "".join(lines).encode()


def finished() -> dict[str, object]:
    fields = COMPLETION.__dataclass_fields__
    return {"completion": {name: getattr(COMPLETION, name) for name in fields}}


async def completions(client: HttpEngine) -> list[object]:
    return [event async for event in client.generate(REQUEST)]


async def test_a_request_without_any_response_is_retried(tmp_path: Path) -> None:
    def third_time(connection: int) -> bytes | None:
        return response(events(finished())) if connection == 3 else None

    async with scripted(tmp_path, third_time) as client:
        assert await completions(client) == [COMPLETION]


async def test_an_engine_that_never_responds_is_unavailable(tmp_path: Path) -> None:
    async with scripted(tmp_path, lambda _: None) as client:
        with pytest.raises(EngineUnavailable, match="could not be reached"):
            await client.models()


@pytest.mark.parametrize(
    "broken",
    [
        response(events({"delta": {"index": 0, "text": "a", "token_ids": [7]}}, done=False), length=9999),
        response(events(done=False)),
        response(events()),
        response(b"data: {not json\n\n"),
        response(b"<html>", "502 Bad Gateway"),
        response(b'{"error": {"message": "later", "code": "engine_unavailable"}}', "503 Service Unavailable"),
    ],
)
async def test_a_truncated_response_is_unavailable_and_not_retried(tmp_path: Path, broken: bytes) -> None:
    heard: list[int] = []

    def once(connection: int) -> bytes:
        heard.append(connection)
        return broken

    async with scripted(tmp_path, once) as client:
        with pytest.raises(EngineUnavailable):
            await completions(client)
    assert heard == [1]


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        ("400 Bad Request", {"message": "bad n", "param": "n", "code": "invalid_value"}, InvalidRequest),
        ("404 Not Found", {"message": "no model", "param": "model", "code": "model_not_found"}, InvalidRequest),
        ("429 Too Many Requests", {"message": "full", "code": "engine_busy"}, EngineBusy),
        ("500 Internal Server Error", {"message": "broke", "code": "engine_error"}, EngineError),
    ],
)
async def test_error_statuses_become_the_exceptions_of_the_interface(
    tmp_path: Path, status: str, error: dict[str, str], expected: type[EngineError]
) -> None:
    body = response(json.dumps({"error": error}).encode(), status)
    async with scripted(tmp_path, lambda _: body) as client:
        with pytest.raises(expected, match=error["message"]) as raised:
            await completions(client)
        assert type(raised.value) is expected
        assert getattr(raised.value, "field", None) == error.get("param")
        with pytest.raises(expected):
            await client.tokenize(TokenizeRequest("m", "text"))


async def test_an_unreachable_engine_is_unavailable(tmp_path: Path) -> None:
    for url in (f"unix://{tmp_path}/nothing.sock", "http://127.0.0.1:9"):
        client = HttpEngine(url)
        with pytest.raises(EngineUnavailable, match="could not be reached"):
            await client.models()
        with pytest.raises(EngineUnavailable, match="could not be reached"):
            await completions(client)
        await client.close()


def test_an_unsupported_url_scheme_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be http"):
        HttpEngine("ftp://somewhere")


def test_the_client_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, engine.remote.http, engine.protocol.types; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_certificates_are_read_once_and_only_for_https(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[ssl.SSLContext] = []
    load = ssl.SSLContext.load_verify_locations

    def loading(context: ssl.SSLContext, *where: str | None, **named: str | None) -> None:
        contexts.append(context)
        load(context, *where, **named)

    get_ssl_context.cache_clear()
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", loading)
    for url in ("unix:///nowhere", "http://127.0.0.1:1"):
        HttpEngine(url)
    assert contexts == []
    for _ in range(3):
        HttpEngine("https://127.0.0.1:1")
    assert [(context.verify_mode, context.check_hostname) for context in contexts] == [(ssl.CERT_REQUIRED, True)]
