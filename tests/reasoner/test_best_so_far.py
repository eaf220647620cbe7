"""A cancelled job returns its best result so far, and no work is done for it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from reasoner.best_so_far import choose_best_so_far
from reasoner.budget.usage import Usage
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import Entry, JobCancelled, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.strategies import WRITING


def job(strategy: str) -> JobSpec:
    params = {} if strategy == "greedy" else {"n": 8}
    return build_spec({"problem": "how?", "seed": 3, "strategy": {"name": strategy} | params})


class CancelledAt(MemoryJournal):
    """Journal that raises on cancellation at one commit and every later one, as a worker's does."""

    def __init__(self, commit: int) -> None:
        super().__init__()
        self._left = commit

    async def append(self, entries: Sequence[Entry]) -> None:
        await super().append(entries)
        self._left -= 1
        if self._left < 0:
            raise JobCancelled


@pytest.mark.parametrize("strategy", WRITING)
async def test_a_cancelled_search_has_an_answer_once_a_branch_has_one(strategy: str) -> None:
    for commit in range(0, 24, 3):
        journal, engine = CancelledAt(commit), ScriptedEngine()
        try:
            await run_job(job(strategy), engine, journal)
        except JobCancelled as end:
            result = end.result
        else:
            break  # it had ended before
        asked, charged = len(engine.generated), sum(entry.spend.generated for entry in journal.entries)
        assert asked == charged
        stated = {entry.data["answer"] for entry in journal.entries if entry.type == "node" and entry.data["final"]}
        assert result is not None
        assert result.finish_reason == "cancelled"
        assert (result.answer is not None) == (stated != {None})
        assert result.answer in stated
        assert engine.outstanding == 0


async def test_a_search_cancelled_before_its_start_has_no_result_and_generates_nothing() -> None:
    cancelled, engine = asyncio.Event(), ScriptedEngine()
    cancelled.set()
    with pytest.raises(JobCancelled) as end:
        await run_job(job("best_of_n"), engine, MemoryJournal(), cancelled=cancelled)
    assert end.value.result is None or end.value.result.answer is None
    assert not engine.generated


def node(name: str, text: str, answer: str | None = None, reason: str = "stop", parent: str = "") -> Entry:
    data = {
        "node": name,
        "parent": parent,
        "text": text,
        "tokens": 4,
        "logprob": -1.0,
        "final": True,
        "reason": reason,
        "answer": answer,
    }
    return Entry(f"complete:{name}:0", "node", data, Usage(generated=4), 0.1)


def score(name: str, value: float) -> Entry:
    data = {"node": name, "scores": [value], "score": value, "computed": 0, "cached": 0}
    return Entry(f"score:{name}", "score", data, Usage(), 0.1)


def found(strategy: str, *entries: Entry) -> JobResult:
    result = choose_best_so_far(job(strategy), entries)
    assert result is not None
    return result


def test_a_strategy_that_chooses_by_score_returns_the_best_scored_candidate() -> None:
    entries = [node("0", "a", "1"), node("1", "b", "2"), node("2", "c", "2"), score("0", 0.9), score("1", 0.6)]
    result = found("best_of_n", *entries, score("2", 0.7))
    assert (result.answer, result.confidence, result.node, result.text) == ("1", 0.9, "0", "a")


def test_a_strategy_that_votes_returns_the_majority_with_its_votes() -> None:
    result = found("self_consistency", node("0", "a", "1"), node("1", "b", "2.0"), node("2", "c", "2"))
    assert (result.answer, result.node) == ("2.0", "1")
    assert result.confidence == pytest.approx(2 / 3)
    assert [(vote.answer, vote.count, vote.weight) for vote in result.votes] == [("2.0", 2, 2.0), ("1", 1, 1.0)]


def test_votes_are_weighted_by_the_verifiers_scores() -> None:
    entries = [node("0", "a", "1"), node("1", "b", "2"), node("2", "c", "2"), score("0", 0.9), score("1", 0.2)]
    result = found("weighted_vote", *entries, score("2", 0.3))
    assert (result.answer, result.confidence) == ("1", pytest.approx(0.9 / 1.4))


def test_without_an_answer_the_text_of_the_most_promising_branch_is_returned() -> None:
    steps = [
        node("0", "good\n\n", reason="step"),
        node("1", "bad\n\n", reason="step"),
        node("2", "no\n\n", reason="step"),
    ]
    pruned = Entry("prune:2", "prune", {"nodes": ["2"]}, Usage(), 0.1)
    further = node("0.0", "and on", reason="cancelled", parent="0")
    result = found("beam", *steps, score("0", 0.8), score("1", 0.1), score("2", 0.9), pruned)
    assert (result.answer, result.text, result.node) == (None, "good\n\n", "0")
    assert found("beam", *steps[:1], further).text == "good\n\nand on"


def test_a_branch_cut_into_segments_is_returned_whole() -> None:
    first = node("0", "one ")
    first.data["final"], first.data["reason"] = False, None
    assert found("greedy", first, node("0", "two", "2")).text == "one two"


def test_a_search_that_has_not_begun_has_no_result() -> None:
    assert choose_best_so_far(job("beam"), []) is None
