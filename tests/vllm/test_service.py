"""The whole service on a real vLLM: each strategy, its bill beside the server's own count, cancels and evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from reasoner.budget.usage import Usage
from tests.strategies import COMPARING, WRITING
from tests.vllm.servers import ROOT, Servers, Service, serving
from tests.vllm.test_client import GENERATED, RUNNING

PROBLEM = "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."
_SOURCES = ("local_compute", "local_cache_hit")
_SIZE: dict[str, dict[str, int]] = defaultdict(lambda: {"n": 4}, greedy={})
_CHAT = """
model = "policy"

[engines.vllm]
url = "{url}/v1"
kind = "chat"
models = ["policy"]
prefill = "continue_final_message"

[models.policy]
verifier = {{kind = "judge"}}
"""


SEARCHES = [name for name in WRITING if name not in COMPARING]
"""Strategies that the servers' models can run: neither of them can compare two solutions."""


@pytest.mark.parametrize("name", SEARCHES)
def test_a_job_of_each_strategy_is_billed_as_the_server_counts(name: str, service: Service, servers: Servers) -> None:
    before = servers.policy.metric(GENERATED)
    job = service.submit(PROBLEM, wait=120, strategy={"name": name}, seed=1, budget={"tokens": 20_000})
    made = servers.policy.metric(GENERATED) - before
    assert job["status"] == "completed", job["error"]
    usage = job["usage"]
    assert job["result"]["answer"] is not None
    assert usage["flops"] > 0
    # Branches that a search gives up cost the server what it generated until it noticed.
    assert 0 < usage["generated"] <= made
    assert usage["generated"] >= 0.5 * made


def test_the_verifier_reads_cached_prefixes_and_no_token_is_billed_twice(service: Service, servers: Servers) -> None:
    def read() -> tuple[float, float]:
        computed, cached = (servers.last.metric("vllm:prompt_tokens_by_source_total", source) for source in _SOURCES)
        return computed, cached

    computed, cached = read()
    spec = {"strategy": {"name": "beam", "n": 16}, "seed": 2, "budget": {"tokens": 20_000}}
    job = service.submit(PROBLEM, wait=120, **spec)
    assert job["status"] == "completed", job["error"]
    more_computed, more_cached = read()
    assert more_cached > cached
    usage = job["usage"]
    assert usage["verifier_computed"] + usage["verifier_cached"] == more_computed + more_cached - computed - cached


def test_grades_behind_branches_read_the_cache_and_are_billed_as_the_server_counts(
    service: Service, servers: Servers
) -> None:
    def read() -> tuple[float, float]:
        return servers.policy.metric("vllm:prompt_tokens_total"), servers.policy.metric(GENERATED)

    prompt, made = read()
    spec = {"strategy": {"name": "best_of_n", "n": 16}, "seed": 4, "verifier": {"kind": "graded"}}
    job = service.submit(PROBLEM, wait=120, **spec)
    assert job["status"] == "completed", job["error"]
    more_prompt, more_made = read()
    usage = job["usage"]
    grades = more_made - made - usage["generated"]  # each samples one token, which is not read
    assert 0 < grades <= 16
    verifier = usage["verifier_computed"] + usage["verifier_cached"]
    assert usage["prompt"] + verifier == more_prompt - prompt + grades
    assert usage["verifier_cached"] > 0.4 * verifier  # whole blocks of short branches


def test_equal_seeds_give_equal_jobs(service: Service) -> None:
    spec = {"strategy": {"name": "best_of_n", "n": 8}, "seed": 7, "deterministic": True}
    first, second = (service.submit(PROBLEM, wait=120, **spec) for _ in range(2))
    assert first["status"] == second["status"] == "completed", (first, second)
    assert first["result"]["answer"] == second["result"]["answer"]
    assert first["usage"]["generated"] == second["usage"]["generated"]


def test_a_token_budget_is_held_exactly(service: Service) -> None:
    job = service.submit(PROBLEM, wait=120, strategy={"name": "best_of_n", "n": 16}, seed=3, budget={"tokens": 500})
    assert job["status"] == "completed", job["error"]
    assert 250 < Usage.model_validate(job["usage"]).total <= 500


def test_a_cancelled_job_ends_the_work_of_the_server(service: Service, servers: Servers) -> None:
    job = service.submit(PROBLEM, strategy={"name": "mcts", "n": 256}, budget={"tokens": 1_000_000})
    service.until(job["id"], lambda state: state["usage"]["generated"] > 0, "the job has generated something")
    service.cancel(job["id"])
    ended = service.until(job["id"], lambda state: state["status"] == "cancelled", "the job is cancelled")
    assert ended["usage"]["generated"] > 0
    service.until(job["id"], lambda _: servers.policy.metric(RUNNING) == 0, "the server has nothing to do")


def test_an_evaluation_runs(servers: Servers, tmp_path: Path) -> None:
    environment = os.environ | servers.settings | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "api.cli.main", "eval", "countdown", "--strategy", "self_consistency,beam"]
    done = subprocess.run(
        [*command, "--n", "4", "--limit", "3", "--json"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["strategy"]: row for row in json.loads(done.stdout)["rows"]}
    assert {"self_consistency", "beam"} <= set(rows)


def test_a_server_that_only_chats_runs_votes_and_judges(servers: Servers, tmp_path: Path) -> None:
    with serving(tmp_path, {}, _CHAT.format(url=servers.policy.url)) as chat:
        for name in ("greedy", "self_consistency", "best_of_n", "weighted_vote", "revise", "beam"):
            job = chat.submit(
                PROBLEM, wait=120, strategy={"name": name, **_SIZE[name]}, seed=1, budget={"tokens": 20_000}
            )
            assert job["status"] == "completed", job["error"]
            assert job["usage"]["generated"] > 0
        refused = chat.submit(PROBLEM, strategy={"name": "deepconf"})
        assert refused["status"] == 422, refused
        assert "log-probabilities" in refused["detail"] or "logprobs" in refused["detail"]
