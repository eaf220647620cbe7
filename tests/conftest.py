"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import signal
import ssl
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import httpx2
import pytest
import structlog
from hypothesis import settings

from tests import seeds

# A run started in the background inherits an ignored Ctrl-C, which all its child processes would ignore too. Ignored
# signals are inherited, handlers are not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests' models are too small for a second thread to help, and on busy processors every operator would wait for it.
# Set before torch is imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests speak to this machine alone, also with clients of others (httpx2 is that of openai's). Processes that they start
# inherit the environment with its proxies, and must not use one by themselves.
for _client in (httpx._client, httpx2._client):
    _client.__dict__["get_environment_proxies"] = dict


def _read_certificates_once(transports: ModuleType) -> None:
    """Read the authorities once for all clients instead of 40 ms for each, even one of plain HTTP."""
    create = transports.__dict__["create_ssl_context"]
    made: dict[Any, ssl.SSLContext] = {}

    def create_once(**arguments: Any) -> ssl.SSLContext:
        if arguments != {"verify": True, "cert": None, "trust_env": arguments.get("trust_env")}:
            return create(**arguments)
        key = arguments["trust_env"], *(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
        return made.get(key) or made.setdefault(key, create(**arguments))

    transports.__dict__["create_ssl_context"] = create_once


for _transports in (httpx._transports.default, httpx2._transports.default):
    _read_certificates_once(_transports)

# Property tests have few examples in every run, and many in `make test-long`.
settings.register_profile("quick", max_examples=30, deadline=None)
settings.register_profile("many", max_examples=300, deadline=None)
settings.load_profile("quick")

_LONGEST = {"test_triton.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=seeds.run_seed(),
        help="shift the seeds of all random weights, inputs and prompts (default 0)",
    )
    parser.addoption("--part", metavar="K/N", help="run the Kth of N parts of the selected tests (default all)")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[seeds.VARIABLE] = str(config.getoption("seed"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"random weights, inputs and prompts: --seed {config.getoption('seed')}"


@pytest.fixture(autouse=True)
def _default_logging() -> None:
    """Log as if each test ran alone: some raise the level for themselves."""
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _global_generators() -> None:
    seeds.seed_global_generators()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark fuzzing as long, and run the longest tests first, so that none begins last on one core while the other
    idles.
    """
    items.sort(key=lambda item: item.path.name not in _LONGEST)
    for item in items:
        if Path(__file__).parent / "fuzz" in item.path.parents:
            item.add_marker("long")
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == number - 1]
