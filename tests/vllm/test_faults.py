"""A vLLM that is killed and started again in the middle of a search, one of two, and one behind a key."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.servers import POLICY, Servers, Vllm, running, serving
from tests.vllm.test_service import PROBLEM

_LONG = {"strategy": {"name": "mcts", "n": 64}, "seed": 5, "budget": {"tokens": 200_000}}
_KEY = "a-secret-of-the-tests"


def test_a_job_survives_the_death_of_each_of_two_servers(servers: Servers, tmp_path: Path) -> None:
    """The other goes on with the job; when both are gone it waits until one is started again."""
    first, second = (Vllm.policy(tmp_path / f"{name}.log") for name in ("first", "second"))
    settings = servers.settings | {"REASONER_ENGINE_URL": f"{first.url},{second.url}"}
    with running(first, second), serving(tmp_path / "s", settings) as service:
        job = service.submit(PROBLEM, **_LONG)["id"]
        service.until(job, lambda state: state["usage"]["generated"] > 100, "the search is under way")
        first.kill()
        seen = service.get(f"/v1/jobs/{job}")["usage"]["generated"]
        service.until(job, lambda state: state["usage"]["generated"] > seen + 100, "the other server goes on")
        second.kill()
        first.start()
        first.wait()
        ended = service.until(job, lambda state: state["status"] in ("completed", "failed"), "the job ends")
    assert ended["status"] == "completed", ended
    assert ended["attempt"] == 1
    assert ended["usage"]["generated"] > seen + 100


def test_a_server_with_a_key_and_a_small_context(tmp_path: Path) -> None:
    server = Vllm(tmp_path / "keyed.log", POLICY, "small", "--api-key", _KEY, "--max-model-len", "256")
    settings = {"REASONER_ENGINE_URL": f"{server.url}/v1", "REASONER_MODEL": "small", "REASONER_PRM": "none"}
    with running(server):
        with serving(tmp_path / "wrong", settings | {"REASONER_ENGINE_API_KEY": "wrong"}, ready=False) as service:
            told = str(service.get("/readyz"))
            assert "key" in told
            assert server.url in told
            assert "wrong" not in told
        with serving(tmp_path / "right", settings | {"REASONER_ENGINE_API_KEY": _KEY}) as service:
            [model] = [one for one in service.get("/v1/models")["data"] if one["id"] == "small"]
            assert model["context"] == 256
            job = service.submit(PROBLEM, wait=60, strategy={"name": "self_consistency", "n": 4})
            assert job["status"] == "completed", job
            refused = service.submit(PROBLEM * 20, wait=60, strategy={"name": "greedy"})
            assert "256" in str(refused), refused
            assert _KEY not in service.log.read_text()
