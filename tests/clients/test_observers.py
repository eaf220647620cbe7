"""Phoenix shows each node of a search with its score, its tokens and its cost, from stock OTLP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.roles.supervisor import free_port
from reasoner.jobs.job import Job
from tests.chaos.processes import until
from tests.clients.conftest import PHOENIX
from tests.vllm.servers import Server, running, serving

PRICES = {"prompt": 1.0, "cached": 0.5, "generated": 4.0}
"""Prices of a million tokens, for us and for Phoenix."""
_TOKEN_TYPES = {
    "prompt": ("input", "PROMPT"),
    "cached": ("cache_read", "PROMPT"),
    "generated": ("output", "COMPLETION"),
}
_SPANS = """query ($condition: String) { projects { edges { node { name spans(first: 100, filterCondition: $condition) {
edges { node { name spanKind spanId parentId tokenCountTotal attributes costSummary { total { cost } } } } } } } } }"""
_CREATE_MODEL = "mutation ($input: CreateModelMutationInput!) { createModel(input: $input) { model { name } } }"


class Phoenix(Server):
    """Phoenix, with its database in a folder."""

    def __init__(self, folder: Path) -> None:
        program, port = PHOENIX / "bin" / "phoenix", free_port()
        settings = {
            "PHOENIX_WORKING_DIR": str(folder),
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(port),
            "PHOENIX_GRPC_PORT": str(free_port()),
            "PHOENIX_TELEMETRY_ENABLED": "false",
            "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        }
        super().__init__(folder / "log", [str(program), "serve"], port, settings, "/healthz")

    def query(self, query: str, **variables: Any) -> dict[str, Any]:
        """Return the data that a GraphQL query selects."""
        body = {"query": query, "variables": variables}
        answer = httpx.post(f"{self.url}/graphql", json=body, timeout=60).raise_for_status().json()
        assert not answer.get("errors"), answer["errors"]
        data: dict[str, Any] = answer["data"]
        return data

    def list_spans(self, condition: str = "") -> dict[str, dict[str, Any]]:
        """Return the spans under which a condition holds by their names, with their attributes read."""
        [project] = self.query(_SPANS, condition=condition)["projects"]["edges"]
        spans = [edge["node"] for edge in project["node"]["spans"]["edges"]]
        return {span["name"]: span | {"attributes": json.loads(span["attributes"])} for span in spans}


@pytest.fixture
def phoenix(tmp_path: Path) -> Iterator[Phoenix]:
    if not (PHOENIX / ".installed").exists():
        pytest.skip("Phoenix is not installed: run make test-harnesses")
    server = Phoenix(tmp_path)
    with running(server):
        costs = [
            {"tokenType": _TOKEN_TYPES[name][0], "kind": _TOKEN_TYPES[name][1], "costPerMillionTokens": price}
            for name, price in PRICES.items()
        ]
        server.query(_CREATE_MODEL, input={"name": "policy", "namePattern": "^policy$", "costs": costs})
        yield server


@pytest.mark.client(name="Phoenix", package="arize-phoenix", runs="spans of a best-of-4: scores, tokens, costs")
def test_phoenix_shows_each_node_with_its_score_its_tokens_and_its_cost(phoenix: Phoenix, tmp_path: Path) -> None:
    prices = "\n".join(f"{name} = {price}" for name, price in PRICES.items())
    configuration = f"[models.policy.prices]\n{prices}\n[models.prm.prices]\nprompt = 2.0\n"
    with serving(tmp_path / "service", {"REASONER_OTLP_URL": phoenix.url}, configuration) as service:
        problem = "Reach 10 from 9, 5 and 6: use each number exactly once, with + - * /."
        job = Job.model_validate(service.submit(problem, wait=60, strategy={"name": "best_of_n", "n": 4}))
        tree = service.get(f"/v1/jobs/{job.id}/tree")
        until(lambda: "invoke_agent best_of_n" in phoenix.list_spans(), "Phoenix has the spans", 60.0)
    spans = phoenix.list_spans()
    agent = spans["invoke_agent best_of_n"]
    assert (agent["spanKind"], agent["attributes"]["reasoner"]["job"]["tokens"]) == ("agent", job.usage.total)
    nodes = [node for node in tree["nodes"] if node["parent"] is not None]
    assert len(nodes) == 4
    for node in nodes:
        span = spans[f"text_completion policy {node['id']}"]
        usage, own = span["attributes"]["gen_ai"]["usage"], span["attributes"]["reasoner"]["node"]
        assert (span["spanKind"], span["parentId"], own["score"]) == ("llm", agent["spanId"], node["score"])
        assert span["tokenCountTotal"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens"] == node["tokens"]
        assert span["costSummary"]["total"]["cost"] == pytest.approx(usage["cost"], rel=1e-12)
        verdict = spans[f"evaluate prm {node['id']}"]
        assert (verdict["spanKind"], verdict["parentId"]) == ("evaluator", span["spanId"])
    bills = [span["attributes"].get("gen_ai", {}).get("usage", {}) for span in spans.values()]
    assert sum(bill.get("cost", 0.0) for bill in bills) == pytest.approx(job.usage.cost, rel=1e-12)
    best = phoenix.list_spans(f"attributes['reasoner']['node']['score'] >= {max(node['score'] for node in nodes)}")
    assert {span["attributes"]["reasoner"]["node"]["state"] for span in best.values()} >= {"selected"}
