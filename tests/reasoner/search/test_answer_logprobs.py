"""Log-probabilities of a result's tokens, compared with a forward pass of transformers; their bill and their budget."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Capability, ModelInfo, TokenizeRequest
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import JobOutcome, run_job
from tests.closeness import assert_rounded
from tests.engine.exact import exact_logits, float32_loss
from tests.scripted import ScriptedEngine
from tests.seeds import shift
from tests.specs import build_spec
from workers.config.settings import Settings

BUNDLED = Path(__file__).parents[3] / "reasoner" / "bundled"
QUESTION = "Make 68 with + - * / from the numbers 10, 12, 8 and 3, each used exactly once."
VOTE = {"name": "self_consistency", "n": 6}


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    models = {"policy": BUNDLED / "policy", "thinker": BUNDLED / "policy-thinking", "prm": BUNDLED / "prm"}
    local = LocalEngine(models, EngineOptions(kv_tokens=16_384, draft="off"))
    yield local
    await local.close()


def name_fields(**fields: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "problem": QUESTION,
        "seed": shift(5),
        "model": "policy",
        "verifier": None,
        "strategy": VOTE,
    }
    return common | {"logprobs": 3, "alternatives": 1} | fields


async def solve(engine: Any, journal: MemoryJournal | None = None, **fields: Any) -> JobOutcome:
    return await run_job(build_spec(name_fields(**fields)), engine, journal or MemoryJournal())


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"temperature": 0.7, "frequency_penalty": 0.5}},
        {
            "strategy": {"name": "beam", "n": 4},
            "verifier": {"kind": "prm", "model": "prm"},
            "steps": {"by": "tokens", "every": 5},
        },
        {"model": "thinker", "sampling": {"thinking_tokens": 60}},
    ],
    ids=["whole", "steps", "thoughts"],
)
async def test_they_equal_a_forward_pass_of_transformers(engine: LocalEngine, fields: dict[str, Any]) -> None:
    """They are the model's own at temperature 1, whatever the sampling, and of the text after the thought."""
    outcome = await solve(engine, **fields)
    job = build_spec(name_fields(**fields))
    folder = BUNDLED / {"policy": "policy", "thinker": "policy-thinking"}[job.model or ""]
    loss = float32_loss(folder).logprob
    prompt = await engine.tokenize(TokenizeRequest(job.model or "", job.to_messages()))
    num_compared = 0
    for solution in outcome.result.solutions:
        assert solution.logprobs is not None
        text = "".join(token.token for token in solution.logprobs)
        shown = solution.text if solution.content is None else solution.content
        assert text.strip("\n") == (shown or "").strip("\n")
        whole = solution.text or ""
        before, answer = whole[: len(whole) - len(text)], whole[len(whole) - len(text) :]
        assert answer == text
        ids = [
            await engine.tokenize(TokenizeRequest(job.model or "", part, special=False)) for part in (before, answer)
        ]
        if len(ids[1]) != len(solution.logprobs):
            continue  # the model has sampled another tokenization of its text
        num_compared += 1
        tokens = [*prompt, *ids[0], *ids[1]]
        exact = exact_logits(folder, tokens)[-len(ids[1]) - 1 : -1].log_softmax(-1)
        ours = torch.tensor([[token.logprob] for token in solution.logprobs])
        assert_rounded(ours, exact.gather(1, torch.tensor(ids[1])[:, None]), loss)
        tops = torch.tensor([[other.logprob for other in token.top] for token in solution.logprobs])
        assert_rounded(tops, exact.topk(3).values, loss)
    assert num_compared > 0


async def test_they_are_billed_as_computed_and_a_replay_costs_nothing(engine: LocalEngine) -> None:
    journal = MemoryJournal()
    outcome = await solve(engine, journal)
    plain = await solve(engine, logprobs=None)
    assert len(outcome.result.solutions) == 2
    assert [solution.node for solution in outcome.result.solutions] == [one.node for one in plain.result.solutions]
    entries = [entry for entry in journal.entries if entry.type == "logprobs"]
    assert len(entries) == 2
    assert journal.entries[-1].type == "select"
    prompt = len(await engine.tokenize(TokenizeRequest("policy", build_spec(name_fields()).to_messages())))
    lengths = {entry.data["node"]: entry.data["tokens"] for entry in journal.entries if entry.type == "node"}
    closed = {entry.data["node"]: entry.data["closed"] for entry in journal.entries if entry.type == "node"}
    expected = [prompt + lengths[name] - closed[name] for name in (entry.data["node"] for entry in entries)]
    assert [entry.spend.verifier_computed for entry in entries] == expected
    assert outcome.usage.verifier_computed == sum(expected)
    assert outcome.usage.total == plain.usage.total + sum(expected)
    again = await run_job(build_spec(name_fields()), ScriptedServer(), journal)
    assert (again.result, again.usage.total) == (outcome.result, outcome.usage.total)


async def test_a_budget_that_is_used_up_leaves_them_out(engine: LocalEngine) -> None:
    plain = await solve(engine, logprobs=None)
    budget = {"tokens": plain.usage.total + 30}
    outcome = await solve(engine, budget=budget)
    assert outcome.result.answer is not None
    assert [solution.logprobs for solution in outcome.result.solutions] == [None, None]
    assert outcome.usage.total <= budget["tokens"]
    room = await solve(engine, budget={"tokens": plain.usage.total + 10_000})
    assert all(solution.logprobs for solution in room.result.solutions)


class ScriptedServer(ScriptedEngine):
    """An engine that serves the policy of a journal and generates nothing new."""

    def __init__(self, *missing: str) -> None:
        super().__init__(die_after=0, context=2000)
        self._missing = frozenset(missing)

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo("policy", "generate", 2000, 100, 1000, capabilities=frozenset(Capability) - self._missing)]


async def test_a_server_without_them_is_refused_before_a_token_is_spent() -> None:
    with pytest.raises(JobRefused, match="does not report those of a given text") as refusal:
        await resolve_job(JobRequest.model_validate(name_fields()), Settings(), ScriptedServer("prompt_logprobs"))
    assert refusal.value.field == "logprobs"
