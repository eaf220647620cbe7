"""Thoughts on a real vLLM that serves the bundled policy that thinks: limits, probes, steps and template variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.vllm.servers import POLICY, Service, Vllm, running, serving

MODEL = POLICY.with_name("policy-thinking")
PROBLEM = "Make 68 with + - * / from the numbers 10, 12, 8 and 3, each used exactly once."
BLOCK = 32
"""Tokens of a block of the server's cache, which shares whole blocks alone."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("thoughts")
    server = Vllm.policy(folder / "vllm.log", model=MODEL)
    place = {"REASONER_ENGINE_URL": server.url, "REASONER_ENGINE_TOKENIZER": str(MODEL)}
    settings = place | {"REASONER_MODEL": "policy", "REASONER_PRM": "none"}
    with running(server), serving(folder / "service", settings) as started:
        yield started


def solve(service: Service, **spec: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a completed job and the nodes of its tree."""
    job = service.submit(PROBLEM, wait=120, seed=1, **spec)
    assert job["status"] == "completed", job["error"]
    nodes: list[dict[str, Any]] = service.get(f"/v1/jobs/{job['id']}/tree")["nodes"]
    return job, nodes


def count(node: dict[str, Any], kind: str, origin: str) -> int:
    """Return the number of tokens of a node's parts of this kind and origin."""
    return sum(part["tokens"] for part in node["parts"] if (part["kind"], part["origin"]) == (kind, origin))


def test_a_thought_has_at_most_its_limit_of_tokens_and_an_answer_follows(service: Service) -> None:
    strategy = {"name": "self_consistency", "n": 6}
    job, nodes = solve(service, strategy=strategy, budget={"tokens": 4000, "thinking_tokens": 40})
    thoughts = [count(node, "thought", "generated") for node in nodes]
    assert len(nodes) == 6
    assert max(thoughts) == 40  # most of them meet it
    assert job["usage"]["thought"] == sum(thoughts)
    assert job["usage"]["generated"] == sum(thoughts) + sum(count(node, "answer", "generated") for node in nodes)
    for node in nodes:
        assert count(node, "thought", "injected") == (3 if count(node, "thought", "generated") == 40 else 0)
    assert "<think>" in job["result"]["text"]
    assert "think>" not in job["result"]["content"]


def test_a_probe_reads_the_thought_from_the_servers_cache(service: Service) -> None:
    job, nodes = solve(
        service,
        strategy={"name": "early_exit", "n": 2, "every": 64, "window": 8},
        budget={"tokens": 4000},
        sampling={"max_tokens": 400},
    )
    requests = [node for node in nodes if node["reason"] == "said"]
    assert len(requests) >= 4
    # Each request but the first of a chain has all of its text but the end of a block, and the appended text, in cache.
    injected = sum(count(node, "thought", "injected") + count(node, "answer", "injected") for node in requests)
    usage = job["usage"]
    computed = usage["prompt"] - usage["cached"]
    generated_nodes = [node for node in nodes if node["reason"] != "said"]
    assert computed <= injected + (BLOCK + 1) * len(generated_nodes) + 64  # the question
    assert usage["cached"] > 2 * computed


def test_steps_within_thoughts_are_scored_and_pruned(service: Service) -> None:
    strategy = {"name": "beam", "n": 4}
    steps, verifier = {"by": "markers", "words": ["Wait", "Alternatively"]}, {"kind": "judge", "reads": "all"}
    spec = {"strategy": strategy, "verifier": verifier, "budget": {"tokens": 8000, "thinking_tokens": 160}}
    _, nodes = solve(service, steps=steps | {"max_tokens": 64}, **spec)
    ended = [node for node in nodes if node["reason"] == "step"]
    assert ended
    assert all(node["tokens"] <= 64 for node in ended)
    assert any(node["text"].endswith(("\nWait", "\nAlternatively")) for node in ended)
    job = service.submit(PROBLEM, wait=60, steps={"by": "sentence"}, **spec)
    assert job["status"] == "failed"
    assert "VLLM_MAX_STOP_STRINGS=6" in job["error"]["message"]


def test_template_variables_reach_the_template_and_unknown_ones_are_refused(service: Service) -> None:
    job, nodes = solve(service, strategy={"name": "greedy"}, chat_template_kwargs={"enable_thinking": False})
    assert job["usage"]["thought"] == 0
    assert all(part["kind"] == "answer" for node in nodes for part in node["parts"])
    job = service.submit(PROBLEM, wait=60, strategy={"name": "greedy"}, chat_template_kwargs={"think": False})
    assert job["status"] == "failed"
    assert "'think'" in job["error"]["message"]
    assert "enable_thinking" in job["error"]["message"]


def test_the_chat_route_gives_the_chosen_thought_as_reasoning_content(service: Service) -> None:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": PROBLEM}],
        "strategy": {"name": "first_finished", "n": 4, "first": 2},
    }
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"]
    assert "think>" not in message["reasoning_content"] + message["content"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
