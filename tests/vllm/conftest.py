"""Servers and services that several modules use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.servers import ENVIRONMENT, Servers, Service, Vllm, running, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    assert (ENVIRONMENT / "bin" / "vllm").exists(), "vLLM is not installed: run make test-vllm"
    folder = tmp_path_factory.mktemp("vllm")
    started = Servers(Vllm.policy(folder / "policy.log"), Vllm.prm(folder / "last.log", last=True))
    with running(started.policy, started.last):
        yield started


@pytest.fixture(scope="session")
def every_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """The PRM with a row for each token."""
    server = Vllm.prm(tmp_path_factory.mktemp("vllm") / "all.log", last=False)
    with running(server):
        yield server


@pytest.fixture(scope="session")
def service(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service"), servers.settings) as started:
        yield started
