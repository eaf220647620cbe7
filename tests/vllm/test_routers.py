"""Searches through the routers of vLLM and of SGLang, each before two vLLM servers and given as the one address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.roles.supervisor import free_port
from tests.chaos.processes import until
from tests.vllm.servers import ROOT, Server, Servers, Service, Vllm, running, serving
from tests.vllm.test_service import PROBLEM

ENVIRONMENT = ROOT / os.environ.get("ROUTERS_ENVIRONMENT", "build/routers")
_MAX_JOBS = 20
"""Jobs after which both of two replicas have one, but for one time in half a million."""
_LONG = {"strategy": {"name": "mcts", "n": 64}, "seed": 5, "budget": {"tokens": 200_000}}
_CHAT = """
model = "policy"

[engines.router]
url = "{url}/v1"
kind = "chat"
models = ["policy"]
context = 512
"""
_ENDED = ("completed", "incomplete", "failed")
Replicas = tuple[Vllm, Vllm]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("replicas")
    first, second = (Vllm.policy(folder / f"{name}.log") for name in ("first", "second"))
    with running(first, second):
        yield first, second


def make_router(program: str, log: Path, *options: str) -> Server:
    path = ENVIRONMENT / "bin" / program
    if not path.exists():
        pytest.skip(f"{program} is not installed in {ENVIRONMENT}: run make test-vllm where its package can be had")
    port = free_port()
    place = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    return Server(log, [str(path), *options, *place], port, {}, "/health")


@pytest.fixture
def behind_vllms_router(replicas: Replicas, servers: Servers, tmp_path: Path) -> Iterator[Service]:
    workers = (replica.url for replica in replicas)
    router = make_router("vllm-router", tmp_path / "log", "--policy", "consistent_hash", "--worker-urls", *workers)
    settings = servers.settings | {"REASONER_ENGINE_URL": router.url}
    with running(router), serving(tmp_path / "s", settings) as service:
        yield service


def check_that_each_job_keeps_to_one_replica(service: Service, replicas: Replicas, strategy: dict[str, object]) -> None:
    """Run jobs until both replicas have had one; the prompts that each replica has read say where a job was."""

    def read() -> list[float]:
        return [replica.metric("vllm:prompt_tokens_total") for replica in replicas]

    used = set()
    for seed in range(_MAX_JOBS):
        before = read()
        hits = [replica.metric("vllm:prefix_cache_hits_total") for replica in replicas]
        job = service.submit(PROBLEM, wait=120, strategy=strategy, seed=seed, budget={"tokens": 20_000})
        assert job["status"] == "completed", job
        [index] = [index for index, (old, new) in enumerate(zip(before, read(), strict=True)) if new > old]
        used.add(index)
        if strategy["name"] == "beam":  # chats are shorter than two blocks of the cache
            assert replicas[index].metric("vllm:prefix_cache_hits_total") > hits[index]
        if len(used) == len(replicas):
            return
    raise AssertionError(f"{_MAX_JOBS} jobs went to one replica")


def test_vllms_router_keeps_the_requests_of_a_job_on_one_replica(
    replicas: Replicas, behind_vllms_router: Service
) -> None:
    check_that_each_job_keeps_to_one_replica(behind_vllms_router, replicas, {"name": "beam", "n": 4})


def test_sglangs_router_keeps_the_chats_of_a_job_on_one_replica(replicas: Replicas, tmp_path: Path) -> None:
    """It takes no token ids and asks a vLLM for no name, so it is chatted with, and told the name of the model."""
    router = make_router("sglang-router", tmp_path / "log", "launch", "--policy", "manual")
    with running(router):
        for replica in replicas:
            worker = {"url": replica.url, "model_id": "policy"}
            httpx.post(f"{router.url}/workers", json=worker, timeout=10).raise_for_status()

        def lists_the_model() -> bool:
            workers = httpx.get(f"{router.url}/workers", timeout=10).json()["workers"]
            return sum(worker["model_id"] == "policy" and worker["is_healthy"] for worker in workers) == len(replicas)

        until(lists_the_model, "the router knows both replicas", 60.0)
        with serving(tmp_path / "s", {}, _CHAT.format(url=router.url)) as service:
            check_that_each_job_keeps_to_one_replica(service, replicas, {"name": "self_consistency", "n": 8})


def test_a_job_goes_on_when_a_replica_behind_the_router_dies(replicas: Replicas, behind_vllms_router: Service) -> None:
    service = behind_vllms_router
    before = [replica.metric("vllm:generation_tokens_total") for replica in replicas]
    job = service.submit(PROBLEM, **_LONG)["id"]
    service.until(job, lambda state: state["usage"]["generated"] > 100, "the search is under way")
    made = [replica.metric("vllm:generation_tokens_total") for replica in replicas]
    [dead] = [index for index, (old, new) in enumerate(zip(before, made, strict=True)) if new > old]
    replicas[dead].kill()
    seen = service.get(f"/v1/jobs/{job}")["usage"]["generated"]
    ended = service.until(job, lambda state: state["status"] in _ENDED, "the job ends")
    assert ended["status"] == "completed", ended
    assert ended["usage"]["generated"] > seen + 100
    assert replicas[1 - dead].metric("vllm:generation_tokens_total") > made[1 - dead]
