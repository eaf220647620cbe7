"""An adapter of the policy that was trained to judge: its grades, on the branches' keys, and its bill."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.judge import JudgeTokens
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import InvalidRequest, TokenizeRequest
from prm.scorers import grades
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job
from tests.engine.adapters.lora import exact_logprobs, save_adapter

BUNDLED = Path(__file__).parents[3] / "reasoner" / "bundled"
QUESTION = "[2, 3, 4]: reach 24."
INVOCATION = (262, 66)
POSITIVE, NEGATIVE = 5, 6
BEAM = {"name": "beam", "n": 4, "expansions": 2}


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalEngine]:
    """Return an engine with random adapters, to which labels are unlikely; their grades count here nevertheless."""
    monkeypatch.setattr(grades, "MIN_GRADE_MASS", 0.0)
    policy = BUNDLED / "policy"
    adapters: dict[str, str | Path] = {}
    for name, fields in (("activated", {"alora_invocation_tokens": list(INVOCATION)}), ("plain", {})):
        adapters[name] = save_adapter(tmp_path / name, policy, modules=("q_proj", "up_proj"), **fields)
        JudgeTokens(INVOCATION, POSITIVE, NEGATIVE).save(tmp_path / name)
    local = LocalEngine(
        {"policy": policy, "large": BUNDLED / "policy-large"}, EngineOptions(kv_tokens=16_384), adapters=adapters
    )
    yield local
    await local.close()


async def solve(
    engine: LocalEngine, verifier: dict[str, Any], strategy: dict[str, object], model: str = "policy"
) -> list[Entry]:
    journal = MemoryJournal()
    fields = {"problem": QUESTION, "model": model, "seed": 3, "strategy": strategy, "budget": {"tokens": 6000}}
    request = JobRequest.model_validate({**fields, "verifier": {"kind": "graded"} | verifier})
    await run_job(resolve_program_job(request), engine, journal)
    return journal.entries


def read_scores(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.type == "score"]


@pytest.mark.parametrize("strategy", [{"name": "best_of_n", "n": 4}, BEAM])
async def test_an_activated_judge_computes_its_invocation_alone(
    strategy: dict[str, object], engine: LocalEngine
) -> None:
    scores = read_scores(await solve(engine, {"model": "activated"}, strategy))
    asked = [entry for entry in scores if entry.spend.verifier_computed]  # the others are of equal branches
    assert len(asked) >= 4
    for entry in asked:
        # The last token of a branch was only sampled; an end-of-sequence token is left out.
        assert entry.spend.verifier_computed in (len(INVOCATION), len(INVOCATION) + 1)
        assert entry.spend.verifier_cached > 10


async def test_the_steps_of_a_beam_have_the_scores_that_transformers_computes(
    engine: LocalEngine, tmp_path: Path
) -> None:
    entries = await solve(engine, {"model": "activated", "aggregation": "min"}, BEAM)
    question = await engine.tokenize(TokenizeRequest("policy", [{"role": "user", "content": QUESTION}]))
    nodes = {entry.data["node"]: entry.data for entry in entries if entry.type == "node"}
    scores = {entry.data["node"]: entry.data["score"] for entry in read_scores(entries)}
    deepest = max(scores, key=lambda name: (name.count("."), name))
    path = deepest.split(".")
    branch, verdicts = question, []
    for end in range(1, len(path) + 1):
        name = ".".join(path[:end])
        branch += tuple(nodes[name]["token_ids"])
        asked = branch[:-1] if nodes[name]["reason"] == "stop" else branch  # without the end-of-sequence token
        exact, bound = exact_logprobs(
            BUNDLED / "policy", tmp_path / "activated", (*asked, *INVOCATION), start=len(asked)
        )
        difference = float(exact[-1, POSITIVE] - exact[-1, NEGATIVE])
        verdicts.append(1 / (1 + math.exp(-difference)))
        assert scores[name] == pytest.approx(min(verdicts), abs=bound)
    assert len(verdicts) > 1


async def test_a_plain_adapter_judges_with_keys_of_its_own(engine: LocalEngine) -> None:
    scores = read_scores(await solve(engine, {"model": "plain"}, {"name": "best_of_n", "n": 4}))
    assert max(entry.spend.verifier_computed for entry in scores) > 20


@pytest.mark.parametrize(
    ("verifier", "model", "reason"),
    [
        ({"model": "activated"}, "large", "let 'policy' alone write the solutions"),
        ({}, "plain", "let 'policy' alone write the solutions"),
        ({"kind": "judge", "model": "activated"}, "policy", r'the verifier \{"kind": "graded", "model": "activated"\}'),
        ({"kind": "judge"}, "plain", r'the verifier \{"kind": "graded", "model": "plain"\}'),
    ],
    ids=["of another model", "of its own branches", "by a prompt", "by a prompt about its own"],
)
async def test_what_an_adapter_was_not_trained_on_is_refused_before_a_token_is_spent(
    verifier: dict[str, Any], model: str, reason: str, engine: LocalEngine
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await solve(engine, verifier, {"name": "best_of_n", "n": 2}, model=model)
    assert [stats.generated_tokens + stats.scored_tokens for stats in engine.stats().values()] == [0, 0]
