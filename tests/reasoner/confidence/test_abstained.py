"""Confidence of a vote in which most samples state no answer: they count for every strategy that votes."""

from __future__ import annotations

from typing import Any

import pytest

from reasoner.best_so_far import choose_best_so_far
from reasoner.confidence.posterior import leader_probability
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import run_job
from tests.reasoner.search.test_stream import Delayed
from tests.scripted import ANSWER, TEXTS, ScriptedEngine
from tests.specs import build_spec

PARIS = ["Paris.", "It is Paris, of course", "Paris it is", "I think Paris", "So the final answer is 27.", "Paris!",
         "The city of Paris", "Paris"]  # fmt: skip
VOTES: list[dict[str, Any]] = [
    {"name": "self_consistency", "n": 16},
    {"name": "self_consistency", "n": 16, "stop": "beta"},
    {"name": "weighted_vote", "n": 16},
    {"name": "early_exit", "n": 8, "every": 32},
    {"name": "first_finished", "n": 12, "first": 3},
    {"name": "deepconf", "n": 16},
    {"name": "deepconf", "n": 16, "mode": "online", "warmup": 4},
    {"name": "budget_forcing", "n": 8},
    {"name": "revise", "n": 9},
    {"name": "aggregate", "n": 6, "rounds": 1},
    {"name": "synthesize", "n": 8},
    {"name": "particle", "n": 8},
    {"name": "rebase", "n": 8},
    {"name": "best_first", "n": 8},
    {"name": "auto", "n": 16},
]


def share(result: JobResult) -> float:
    """Return the share of the first answer among votes and abstentions, which weigh as much as a vote on average."""
    num_votes = sum(vote.count for vote in result.votes)
    weight = sum(vote.weight for vote in result.votes)
    return result.votes[0].weight / weight * num_votes / (num_votes + (result.abstained or 0))


async def solve(fields: dict[str, Any], engine: ScriptedEngine | None = None) -> JobResult:
    spec = build_spec({"problem": "how?", "seed": 3} | fields)
    return (await run_job(spec, engine or Delayed(3), MemoryJournal())).result


@pytest.mark.parametrize("by", ["majority", "weighted"])
async def test_one_stray_number_among_seven_silent_candidates_has_their_share(by: str) -> None:
    result = await solve({"candidates": PARIS, "strategy": {"name": "select", "by": by}})
    assert (result.answer, result.abstained) == ("27", 7)
    assert result.confidence == pytest.approx(1 / 8)
    assert result.ranking[0].share == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    "box", ["\\boxed{}", "\\boxed{?}", "\\boxed{ }", "\\boxed{\\ }", "\\boxed{...}", "\\boxed{answer}"]
)
async def test_a_box_without_an_answer_has_no_vote(box: str) -> None:
    texts = [f"I do not know. ${box}$"] * 12 + ["So $\\boxed{27}$"]
    for compare in ("math", "text"):
        result = await solve({"candidates": texts, "strategy": {"name": "select", "by": "majority"}, "answer": compare})
        assert (result.answer, result.abstained) == ("27", 12)
        assert result.confidence == pytest.approx(1 / 13)


@pytest.mark.parametrize("strategy", VOTES, ids=lambda fields: "-".join(map(str, fields.values())))
async def test_every_vote_counts_who_is_silent(strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only boxes with an even number be answers, so that about half of the scripted engine's texts state none."""
    seen = 0
    for seed in range(4):
        spec = build_spec(
            {
                "problem": "how?",
                "seed": seed,
                "strategy": strategy,
                "answer": {"extract": {"regex": "box...([02468])}"}},
            }
        )
        journal = MemoryJournal()
        result = (await run_job(spec, Delayed(seed, thinks=strategy["name"] == "early_exit"), journal)).result
        if not result.votes:
            continue
        assert result.abstained is not None
        seen += result.abstained > 0
        if strategy["name"] in ("auto", "best_first"):
            assert result.confidence is not None
            assert result.confidence <= 1.0
        else:
            assert result.confidence == pytest.approx(share(result))
        assert [other.share for other in result.alternatives] == []
    assert seen > 0


async def test_a_cancelled_vote_counts_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = MemoryJournal()
    spec = build_spec({"problem": "how?", "seed": 1, "strategy": {"name": "self_consistency", "n": 16}})
    await run_job(spec, Delayed(1), journal)
    result = choose_best_so_far(spec, journal.entries)
    assert result is not None
    assert result.abstained is not None
    assert result.confidence == pytest.approx(share(result))


async def test_silence_keeps_an_adaptive_vote_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers in twelve samples do not make sure of anything, whatever they agree on."""
    assert leader_probability([3.0], 9.0) < 0.1
    assert leader_probability([4.0], 0.0) > 0.95 > leader_probability([4.0], 1.0)
    monkeypatch.setitem(TEXTS, ANSWER, "\\boxed{%d}")
    always = build_spec({"problem": "how?", "seed": 1, "strategy": {"name": "auto", "n": 16}})
    result = (await run_job(always, Delayed(1), MemoryJournal())).result
    assert result.confidence is not None
