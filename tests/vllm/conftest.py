"""Servers and services that several modules use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.vllm.servers import ENVIRONMENT, POLICY, PRM, Service, Vllm, running, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("vllm")
            item.add_marker(pytest.mark.timeout(900))


@dataclass(frozen=True)
class Servers:
    """A policy and a PRM, each on a vLLM of its own."""

    policy: Vllm
    prm: Vllm

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a service on these servers."""
        return {
            "REASONER_ENGINE_URL": self.policy.url,
            "REASONER_MODEL": "policy",
            "REASONER_ENGINE_TOKENIZER": str(POLICY),
            "REASONER_PRM": "prm",
            "REASONER_PRM_URL": self.prm.url,
            "REASONER_PRM_TOKENIZER": str(PRM),
        }


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    assert (ENVIRONMENT / "bin" / "vllm").exists(), "vLLM is not installed: run make test-vllm"
    folder = tmp_path_factory.mktemp("vllm")
    started = Servers(Vllm.policy(folder / "policy.log"), Vllm.prm(folder / "prm.log"))
    with running(started.policy, started.prm):
        yield started


@pytest.fixture(scope="session")
def service(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service"), servers.settings) as started:
        yield started
