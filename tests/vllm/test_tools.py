"""Python in solutions, constraints, penalties and log-probabilities on a real vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.protocol.types import EngineClient, TokenizeRequest
from engine.remote.http import HttpEngine
from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.suites.registry import open_suite
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import JobOutcome, run_job
from tests.specs import build_spec
from tests.vllm.servers import ROOT, Vllm, running

MODEL = ROOT / "reasoner" / "bundled" / "policy-python"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["sum", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    log = tmp_path_factory.mktemp("vllm") / "python.log"
    # Without this a weak model may write line breaks up to its limit.
    compact = json.dumps({"backend": "guidance", "disable_any_whitespace": True})
    server = Vllm.policy(log, "--structured-outputs-config", compact, model=MODEL)
    with running(server):
        yield server


@pytest.fixture
async def engine(server: Vllm) -> AsyncIterator[EngineClient]:
    client = HttpEngine(server.url, tokenizer=Path(MODEL))
    yield client
    await client.close()


async def solve(engine: EngineClient, journal: MemoryJournal | None = None, **fields: Any) -> JobOutcome:
    common = {"model": "policy", "seed": 5, "verifier": None, "strategy": {"name": "self_consistency", "n": 4}}
    spec = build_spec(common | {"budget": {"tokens": 4000}} | fields)
    return await run_job(spec, engine, journal or MemoryJournal())


async def test_solutions_run_python_on_vllm(engine: EngineClient) -> None:
    suite = open_suite("arithmetic", limit=4)
    for problem in suite.problems:
        journal = MemoryJournal()
        outcome = await solve(engine, journal, problem=problem.text, tools=[{"type": "python"}])
        assert await suite.check(problem, outcome.result.answer, Equivalence())
        assert outcome.usage.tool_calls >= 4
        billed = sum(
            entry.data["tokens"] for entry in journal.entries if "call_ended" not in entry.data and entry.type == "node"
        )
        assert outcome.usage.generated == billed


async def test_solutions_are_held_to_a_schema_on_vllm(engine: EngineClient) -> None:
    outcome = await solve(engine, problem="1 + 1?", constraint={"json_schema": SCHEMA})
    for vote in outcome.result.votes:
        jsonschema.validate(json.loads(vote.answer), SCHEMA)
    assert outcome.result.votes


async def test_vllm_renders_functions_for_a_template(server: Vllm) -> None:
    client = HttpEngine(server.url)
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    question = [{"role": "user", "content": "1 + 1?"}]
    plain = await client.tokenize(TokenizeRequest("policy", question))
    # This model's template reads no functions, and the server takes them all the same.
    assert await client.tokenize(TokenizeRequest("policy", question, template_kwargs={"tools": tools})) == plain
    await client.close()


async def test_vllm_computes_log_probabilities_of_the_chosen_solution(engine: EngineClient) -> None:
    [problem] = open_suite("arithmetic", limit=1).problems
    outcome = await solve(engine, problem=problem.text, logprobs=2)
    tokens = outcome.result.logprobs
    assert tokens
    assert all(token.logprob <= 0 and len(token.top) >= 2 for token in tokens)
    text = "".join(token.token for token in tokens)
    assert text.strip() == (outcome.result.text or "").strip()


async def test_vllm_applies_penalties(engine: EngineClient) -> None:
    [problem] = open_suite("arithmetic", limit=1).problems
    texts = []
    for penalty in (0.0, 2.0):
        sampling = {"temperature": 0.0, "frequency_penalty": penalty, "max_tokens": 60}
        outcome = await solve(engine, problem=problem.text, strategy={"name": "greedy"}, sampling=sampling)
        texts.append(outcome.result.text)
    assert texts[0] != texts[1]
