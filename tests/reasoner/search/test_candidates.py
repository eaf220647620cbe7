"""Strict answers come before flexible ones, and a search without an answer returns its best text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.protocol.types import Completion, GenerateRequest
from reasoner.best_so_far import choose_best_so_far
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.run import JobOutcome, run_job
from reasoner.tree import make_branch_key
from tests.scripted import EOS, ScriptedEngine
from tests.specs import build_spec

NUM_TOKENS = 4
SEVEN, THREE = "so it is \\boxed{7}", "there are 3 rolls left here"


class Telling(ScriptedEngine):
    """Engine whose branches end with given texts and log-probabilities, by their index below the root."""

    def __init__(self, *solutions: tuple[str, float], reason: str = "stop") -> None:
        super().__init__()
        self._solutions = {make_branch_key((index,)): solution for index, solution in enumerate(solutions)}
        self._reason = reason

    def _complete(self, request: GenerateRequest, index: int) -> Completion:
        branch = request.branches[index]
        text, logprob = self._solutions[branch.key]
        ids = (*(40 + ord(char) % 10 for char in text[: NUM_TOKENS - 1]), EOS)
        self.outstanding -= branch.max_tokens
        self.total += len(ids)
        stop = EOS if self._reason == "stop" else None
        return Completion(index, ids, text, self._reason, stop, logprob, len(request.prompt), 0)


async def solve(engine: Telling, journal: MemoryJournal | None = None, **fields: Any) -> JobOutcome:
    body = {"problem": "how many?", "seed": 1, "verifier": None} | fields
    return await run_job(build_spec(body), engine, journal or MemoryJournal())


def vote(n: int, **params: Any) -> dict[str, Any]:
    return {"name": "self_consistency", "n": n} | params


async def test_flexible_answers_do_not_outvote_a_strict_one() -> None:
    engine = Telling((THREE, -1.0), (THREE, -1.0), (SEVEN, -1.0), (THREE, -1.0))
    journal = MemoryJournal()
    result = (await solve(engine, journal, strategy=vote(4))).result
    assert (result.answer, result.answer_level, result.confidence, result.abstained) == ("7", "strict", 0.25, 3)
    assert [(ballot.answer, ballot.count) for ballot in result.votes] == [("7", 1)]
    levels = {entry.data["node"]: entry.data["answer_level"] for entry in journal.entries if entry.type == "node"}
    assert levels == {"0": "flexible", "1": "flexible", "2": "strict", "3": "flexible"}


async def test_flexible_answers_vote_where_there_is_no_strict_one() -> None:
    engine = Telling((THREE, -1.0), ("I have no idea", -1.0), ("it may be 5 or so", -1.0), (THREE, -1.0))
    outcome = await solve(engine, strategy=vote(4))
    assert (outcome.status, outcome.result.answer, outcome.result.answer_level) == ("completed", "3", "flexible")
    assert [(ballot.answer, ballot.count) for ballot in outcome.result.votes] == [("3", 2), ("5", 1)]


async def test_a_flexible_answer_that_a_rule_confirms_wins() -> None:
    rule = {"kind": "numeric", "expected": 3}
    result = (
        await solve(Telling((SEVEN, -1.0), (THREE, -1.0)), verifier=rule, strategy={"name": "best_of_n", "n": 2})
    ).result
    assert (result.answer, result.answer_level, result.confidence) == ("3", "flexible", 1.0)


@pytest.mark.parametrize(("text", "samples"), [(SEVEN, 4), (THREE, 8)])
async def test_only_strict_answers_end_a_vote_early(text: str, samples: int) -> None:
    journal = MemoryJournal()
    outcome = await solve(Telling(*[(text, -1.0)] * 8), journal, strategy=vote(8, stop="beta"))
    assert outcome.result.votes[0].count == samples == sum(entry.type == "node" for entry in journal.entries)


async def test_a_solution_that_a_limit_cut_has_no_flexible_answer() -> None:
    outcome = await solve(
        Telling((THREE, -1.0), reason="length"), strategy=vote(1), sampling={"max_tokens": NUM_TOKENS}
    )
    assert (outcome.status, outcome.result.answer, outcome.result.text) == ("incomplete", None, THREE)


async def test_without_an_answer_the_likeliest_finished_text_is_returned() -> None:
    engine = Telling(("none to see", -9.0), ("who knows", -2.0), ("a longer text without an answer", -5.0))
    outcome = await solve(engine, strategy=vote(3))
    result = outcome.result
    assert (outcome.status, result.finish_reason, result.confidence) == ("completed", "no_answer", None)
    assert (result.answer, result.answer_level) == (None, None)
    assert (result.text, result.node) == ("who knows", "1")


async def test_only_a_search_in_which_nothing_is_finished_is_incomplete() -> None:
    cut = Telling(("a text that goes", -1.0), reason="length")
    outcome = await solve(cut, strategy=vote(1), sampling={"max_tokens": NUM_TOKENS})
    assert (outcome.status, outcome.result.finish_reason, outcome.result.text) == (
        "incomplete",
        "no_answer",
        "a text that goes",
    )
    outcome = await solve(Telling(("  ", -1.0)), strategy=vote(1))
    assert (outcome.status, outcome.result.answer) == ("incomplete", None)


async def test_a_number_in_a_text_is_no_advantage_where_the_score_decides() -> None:
    """The best score wins among solutions that state no answer, whether or not they end in a number."""
    texts = ["an apple", "a pear, of which there are 3", "a plum", "2 figs"]
    chosen = set()
    for first in range(len(texts)):
        engine = Telling(*[(text, -1.0) for text in [*texts[first:], *texts[:first]]])
        journal = MemoryJournal()
        fields: dict[str, Any] = {"verifier": {"kind": "prm"}, "strategy": {"name": "best_of_n", "n": 4}}
        outcome = await solve(engine, journal, **fields)
        scores = {entry.data["node"]: entry.data["score"] for entry in journal.entries if entry.type == "score"}
        assert len(scores) == 4
        assert (outcome.result.node, outcome.result.confidence) == max(scores.items(), key=lambda item: item[1])
        chosen.add(outcome.result.answer)
        again = await solve(engine, MemoryJournal(journal.entries), **fields)
        assert again.result == outcome.result
    assert None in chosen


async def test_a_cancelled_search_without_an_answer_has_its_best_finished_text() -> None:
    journal = MemoryJournal()
    spec = build_spec({"problem": "how many?", "seed": 1, "verifier": None, "strategy": vote(3)})
    await run_job(spec, Telling(("none to see", -9.0), ("who knows", -2.0), ("hard to say", -5.0)), journal)
    best = choose_best_so_far(spec, journal.entries)
    assert best is not None
    assert (best.answer, best.text, best.finish_reason) == (None, "who knows", "cancelled")


async def test_a_single_sample_has_no_confidence() -> None:
    result = (await solve(Telling((SEVEN, -1.0)), strategy=vote(1))).result
    assert (result.answer, result.confidence) == ("7", None)
    assert [(ballot.answer, ballot.count) for ballot in result.votes] == [("7", 1)]


async def test_without_an_answer_the_text_with_the_best_score_is_returned_and_scores_are_billed() -> None:
    texts = [("none to see", -9.0), ("who knows", -2.0), ("hard to say", -5.0)]
    fields: dict[str, Any] = {"verifier": {"kind": "prm"}, "strategy": {"name": "best_of_n", "n": 3}}
    journal = MemoryJournal()
    outcome = await solve(Telling(*texts), journal, **fields)
    scores = {entry.data["node"]: entry.data["score"] for entry in journal.entries if entry.type == "score"}
    assert len(scores) == 3
    assert outcome.result.node == max(scores, key=lambda name: scores[name])
    assert outcome.result.finish_reason == "no_answer"
    assert outcome.usage.verifier_computed > 0
    again = await solve(Telling(*texts), MemoryJournal(journal.entries), **fields)
    assert again.result == outcome.result


async def test_a_budget_that_ends_with_the_solutions_is_no_cut() -> None:
    """Scores that only choose among texts without an answer do not turn ``no_answer`` into ``budget``."""
    fields: dict[str, Any] = {"verifier": {"kind": "prm"}, "strategy": {"name": "best_of_n", "n": 2}}
    budget = {"tokens": 2 * NUM_TOKENS}
    outcome = await solve(
        Telling(("none to see", -9.0), ("who knows", -2.0)),
        budget=budget,
        sampling={"max_tokens": NUM_TOKENS},
        **fields,
    )
    assert (outcome.result.finish_reason, outcome.result.text) == ("no_answer", "who knows")


def _without_levels(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries as versions without levels wrote them."""
    for entry in entries:
        entry.data.pop("answer_level", None)
    return list(entries)


async def test_the_answers_of_an_earlier_versions_journal_are_strict() -> None:
    journal = MemoryJournal()
    spec = build_spec({"problem": "how many?", "seed": 1, "verifier": None, "strategy": vote(2)})
    first = await run_job(spec, Telling((SEVEN, -1.0), (SEVEN, -1.0)), journal)
    entries = _without_levels(journal.entries)
    assert (await run_job(spec, Telling(), MemoryJournal(entries))).result == first.result
    best = choose_best_so_far(spec, entries)
    assert best is not None
    assert (best.answer, best.answer_level) == ("7", "strict")
