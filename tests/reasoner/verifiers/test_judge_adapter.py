"""A judge that is an adapter of the policy: it reads the branches' keys, and its bill says so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import InvalidRequest
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job
from tests.engine.adapters.lora import save_adapter

BUNDLED = Path(__file__).parents[3] / "reasoner" / "bundled"
QUESTION = "[2, 3, 4]: reach 24."
INVOCATION = (262, 66)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[LocalEngine]:
    policy = BUNDLED / "policy"
    adapters: dict[str, str | Path] = {}
    for name, fields in (("activated", {"alora_invocation_tokens": list(INVOCATION)}), ("plain", {})):
        adapters[name] = save_adapter(tmp_path / name, policy, modules=("q_proj", "up_proj"), **fields)
        judge = {"invocation": INVOCATION, "positive": 5, "negative": 6}
        (tmp_path / name / "reasoner_judge.json").write_text(json.dumps(judge))
    local = LocalEngine(
        {"policy": policy, "large": BUNDLED / "policy-large"}, EngineOptions(kv_tokens=16_384), adapters=adapters
    )
    yield local
    await local.close()


async def solve(engine: LocalEngine, verifier: str, strategy: dict[str, object], model: str = "policy") -> list[Entry]:
    journal = MemoryJournal()
    fields = {"problem": QUESTION, "model": model, "seed": 3, "strategy": strategy, "budget": {"tokens": 6000}}
    request = JobRequest.model_validate({**fields, "verifier": {"kind": "judge", "model": verifier}})
    await run_job(resolve_program_job(request), engine, journal)
    return journal.entries


def read_scores(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.type == "score"]


@pytest.mark.parametrize("strategy", [{"name": "best_of_n", "n": 4}, {"name": "beam", "n": 4, "expansions": 2}])
async def test_an_activated_judge_computes_its_invocation_alone(
    strategy: dict[str, object], engine: LocalEngine
) -> None:
    scores = read_scores(await solve(engine, "activated", strategy))
    asked = [entry for entry in scores if entry.spend.verifier_computed]  # the others are of equal branches
    assert len(asked) >= 4
    for entry in asked:
        # The last token of a branch was only sampled; an end-of-sequence token is left out.
        assert entry.spend.verifier_computed in (len(INVOCATION), len(INVOCATION) + 1)
        assert entry.spend.verifier_cached > 10


async def test_a_plain_adapter_judges_with_keys_of_its_own(engine: LocalEngine) -> None:
    scores = read_scores(await solve(engine, "plain", {"name": "best_of_n", "n": 4}))
    assert max(entry.spend.verifier_computed for entry in scores) > 20


async def test_the_branches_of_another_model_are_refused_before_a_token_is_spent(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequest, match="'activated' judges branches of 'policy' alone"):
        await solve(engine, "activated", {"name": "best_of_n", "n": 2}, model="large")
