"""The probe as a verifier: every strategy that scores, its bill, its journal, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.protocol.types import EngineUnavailable, InvalidRequest, ModelInfo, ScoreRequest, ScoreResult
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.registry import STRATEGIES
from tests.scripted import ScriptedEngine, probe_score
from tests.specs import build_spec

SCORING = sorted(name for name, strategy in STRATEGIES.items() if strategy.needs_verifier)


class Served(ScriptedEngine):
    """Engine that records its score requests. ``own`` is true if the policy has the probe, else a copy of it has."""

    def __init__(self, *, own: bool = True, die_after: int | None = None, fingerprint: str = "") -> None:
        super().__init__(probes=True, die_after=die_after)
        self._own = own
        self._fingerprint = fingerprint
        self.scored: list[ScoreRequest] = []

    async def models(self) -> list[ModelInfo]:
        policy, prm = await super().models()
        if self._own:
            return [policy, prm]
        return [replace(policy, probe=None), replace(policy, id="copy", fingerprint=self._fingerprint), prm]

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        self.scored.append(request)
        return await super().score(request)


def spec(strategy: str = "beam", *, tokens: int | None = None, flops: float | None = None, **verifier: Any) -> JobSpec:
    return build_spec(
        {
            "problem": "how?",
            "model": "policy",
            "seed": 4,
            "strategy": {"name": strategy},
            "budget": {"tokens": tokens, "flops": flops},
            "verifier": {"kind": "probe"} | verifier,
        }
    )


async def run(job: JobSpec, engine: ScriptedEngine, journal: MemoryJournal | None = None) -> JobOutcome:
    return await run_job(job, engine, journal or MemoryJournal())


def entries(journal: MemoryJournal, type: str) -> dict[str, Entry]:
    return {entry.data["node"]: entry for entry in journal.entries if entry.type == type}


@pytest.mark.parametrize("strategy", SCORING)
async def test_every_strategy_that_scores_uses_the_scores_that_decoding_read_for_no_token(strategy: str) -> None:
    engine, journal = Served(), MemoryJournal()
    outcome = await run(spec(strategy), engine, journal)
    nodes, scores = entries(journal, "node"), entries(journal, "score")
    assert scores
    assert not engine.scored
    for name, entry in scores.items():
        assert entry.data["scores"] == [nodes[name].data["probe"]]
        assert entry.spend.total == 0
        assert entry.spend.flops in (0, 2 * 11)  # nothing for a text that was scored before
    assert outcome.usage.verifier_computed == 0
    assert outcome.usage.total == engine.total


async def test_scores_are_read_before_the_last_token_of_a_branch() -> None:
    engine, journal = Served(), MemoryJournal()
    await run(spec("best_of_n"), engine, journal)
    prompt = engine.requests[0].prompt
    for entry in entries(journal, "node").values():
        assert entry.data["probe"] == probe_score(prompt + tuple(entry.data["token_ids"])[:-1])


async def test_a_policy_elsewhere_is_scored_by_one_pass_of_its_copy_with_the_same_values() -> None:
    own, other = Served(), Served(own=False)
    journals = MemoryJournal(), MemoryJournal()
    await run(spec("beam"), own, journals[0])
    outcome = await run(spec("beam", model="copy"), other, journals[1])
    first, second = (
        {name: entry.data["scores"] for name, entry in entries(journal, "score").items()} for journal in journals
    )
    assert first == second
    assert {request.model for request in other.scored} == {"copy"}
    assert outcome.usage.verifier_computed > 0
    assert not any(request.probe for request in other.requests)


async def test_a_journaled_branch_without_a_probe_score_is_computed_and_billed() -> None:
    """As after an update: a version that read no probe wrote the last branch, and ended before its score."""
    whole, old = MemoryJournal(), MemoryJournal()
    expected = await run(spec("best_of_n"), Served(), whole)
    *earlier, branch, score, _ = whole.entries
    assert (branch.type, score.type) == ("node", "score")
    data = {name: value for name, value in branch.data.items() if name != "probe"}
    await old.append([*earlier, replace(branch, data=data)])
    engine = Served()
    outcome = await run(spec("best_of_n"), engine, old)
    assert not engine.requests
    [request] = engine.scored
    assert request.probe
    assert outcome.usage.verifier_computed == engine.total > 0
    assert outcome.result == expected.result


@pytest.mark.parametrize("strategy", ["beam", "best_of_n", "mcts"])
async def test_a_job_resumed_from_its_journal_has_the_same_scores_and_computes_none(strategy: str) -> None:
    whole = MemoryJournal()
    expected = await run(spec(strategy), Served(), whole)
    journal = MemoryJournal()
    with pytest.raises(EngineUnavailable):
        await run(spec(strategy), Served(die_after=5), journal)
    assert journal.entries
    engine = Served()
    outcome = await run(spec(strategy), engine, journal)
    assert not engine.scored
    scored, again = entries(whole, "score"), entries(journal, "score")
    assert all(again[name].data["scores"] == entry.data["scores"] for name, entry in scored.items() if name in again)
    assert outcome.usage.verifier_computed == 0
    assert outcome.status == expected.status


async def test_flops_of_the_head_count_against_a_budget_of_flops() -> None:
    limit = 2 * 1000 * 400
    outcome = await run(spec("beam", flops=limit), Served())
    assert 0 < outcome.usage.flops <= limit


@pytest.mark.parametrize("tokens", [1, 40, 300])
async def test_a_token_budget_is_kept_and_still_buys_scores(tokens: int) -> None:
    engine = Served()
    outcome = await run(spec("best_of_n", tokens=tokens), engine)
    assert outcome.usage.total == engine.total <= tokens


async def test_a_policy_without_a_probe_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidRequest, match=r"verifier\.model 'policy' has no probe; served with one are none: fit one"
    ):
        await run(spec(), ScriptedEngine())
    with pytest.raises(
        InvalidRequest, match=r"verifier\.model 'policy' has no probe; served with one are copy: fit one"
    ):
        await run(spec(), Served(own=False))


async def test_the_probe_of_other_weights_or_of_another_vocabulary_is_refused_by_name() -> None:
    class Other(Served):
        async def models(self) -> list[ModelInfo]:
            policy, copy, prm = await super().models()
            return [replace(policy, fingerprint="aa"), copy, prm]

    with pytest.raises(InvalidRequest, match="'policy' has other weights: fit a probe for 'policy'"):
        await run(spec(model="copy"), Other(own=False, fingerprint="bb"))

    class Larger(Served):
        async def models(self) -> list[ModelInfo]:
            policy, copy, prm = await super().models()
            return [policy, replace(copy, vocab_size=200), prm]

    with pytest.raises(InvalidRequest, match="a vocabulary of 200 tokens and 'policy' of 100"):
        await run(spec(model="copy"), Larger(own=False))
