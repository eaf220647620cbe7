"""An engine, its server, and clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from engine.core.local_engine import LocalEngine
from engine.remote.http import HttpEngine
from tests.engine.conftest import Checkpoints
from tests.engine.server.calls import OPTIONS
from tests.engine.serving import served


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Iterator[LocalEngine]:
    local = LocalEngine({"m": checkpoints("qwen3"), "prm": checkpoints("qwen3_classify")}, OPTIONS)
    yield local
    asyncio.run(local.close())


@pytest.fixture(scope="module")
def address(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(engine, tmp_path_factory.mktemp("socket") / "engine.sock") as url:
        yield url


@pytest.fixture
async def client(address: str) -> AsyncIterator[HttpEngine]:
    http = HttpEngine(address)
    yield http
    await http.close()


@pytest.fixture
async def http(address: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix://"))
    async with httpx.AsyncClient(base_url="http://engine", transport=transport, timeout=60) as raw:
        yield raw
