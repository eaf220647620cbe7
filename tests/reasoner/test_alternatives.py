"""Alternatives of a result: the best solutions of the next answers, in the order of the strategy's own choice."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol.types import Branch
from reasoner.alternatives import choose_alternatives, list_rivals
from reasoner.answers.canonical import canonicalize
from reasoner.best_so_far import choose_best_so_far
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from reasoner.strategies.base import Choice
from reasoner.tree import Node
from tests.scripted import ScriptedEngine
from tests.specs import build_spec
from tests.strategies import WRITING


def job(strategy: str, **fields: Any) -> JobSpec:
    params = {} if strategy == "greedy" else {"n": 8}
    return build_spec({"problem": "how?", "seed": 3, "strategy": {"name": strategy} | params} | fields)


async def solve(strategy: str, **fields: Any) -> JobResult:
    return (await run_job(job(strategy, **fields), ScriptedEngine(), MemoryJournal())).result


@pytest.mark.parametrize("strategy", WRITING)
async def test_every_strategy_gives_distinct_answers_and_the_same_choice_as_without(strategy: str) -> None:
    plain, result = await solve(strategy), await solve(strategy, alternatives=7)
    assert plain.alternatives == []
    assert result.model_copy(update={"alternatives": []}) == plain
    answers = [solution.answer for solution in result.solutions]
    if strategy != "tournament":  # whose players need no answer
        assert len({canonicalize(answer or "") for answer in answers}) == len(answers)
    assert len({solution.node for solution in result.solutions}) == len(answers)
    two = await solve(strategy, alternatives=1)
    assert two.alternatives == result.alternatives[:1]
    if strategy == "greedy":
        assert result.alternatives == []


async def test_a_vote_ranks_answers_by_their_share_with_its_heaviest_solution() -> None:
    result = await solve("weighted_vote", alternatives=7)
    num_votes = sum(vote.count for vote in result.votes)
    total = sum(vote.weight for vote in result.votes) * (num_votes + (result.abstained or 0)) / num_votes
    shares = [vote.weight / total for vote in result.votes]
    assert len(shares) > 2
    assert [alternative.share for alternative in result.alternatives] == pytest.approx(shares[1:])
    assert [canonicalize(one.answer or "") for one in result.alternatives] == [
        canonicalize(vote.answer) for vote in result.votes[1:]
    ]


async def test_scores_rank_answers_by_their_best_solution() -> None:
    journal = MemoryJournal()
    outcome = await run_job(job("best_of_n", alternatives=7), ScriptedEngine(), journal)
    answers = {
        entry.data["node"]: entry.data["answer"]
        for entry in journal.entries
        if entry.type == "node" and entry.data["answer"] is not None
    }
    best: dict[str, float] = {}
    for entry in journal.entries:
        if entry.type == "score" and entry.data["node"] in answers:
            answer = canonicalize(answers[entry.data["node"]])
            best[answer] = max(best.get(answer, 0.0), entry.data["score"])
    ranked = sorted(best, key=lambda answer: -best[answer])
    assert len(ranked) > 2
    assert [canonicalize(one.answer or "") for one in outcome.result.solutions] == ranked
    assert [one.score for one in outcome.result.alternatives] == [best[answer] for answer in ranked[1:]]


def leaf(index: int, root: Node, answer: str | None, score: float | None = None) -> Node:
    node = Node((index,), root, (), text=f"text {answer or index % 2}", answer=answer, score=score, reason="stop")
    node.answer_level = None if answer is None else "strict"
    root.children.append(node)
    return node


def test_without_scores_the_answer_of_more_solutions_comes_first() -> None:
    spec, root = job("synthesize", alternatives=7), Node((), None, ())
    nodes = [leaf(index, root, answer) for index, answer in enumerate("abccda")]
    choice = Choice(nodes[1])
    rivals = list_rivals(spec, root, choice)
    groups = [
        [node for node in rivals if node.answer == answer] for answer in dict.fromkeys(one.answer for one in rivals)
    ]
    assert [one.node for one in choose_alternatives(spec, choice, rivals, groups)] == [nodes[0], nodes[2], nodes[4]]


def test_a_tournament_ranks_by_its_standings_also_solutions_without_an_answer() -> None:
    spec, root = job("tournament", alternatives=7), Node((), None, ())
    nodes = [leaf(index, root, answer) for index, answer in enumerate(("a", None, "a", None, "b", None))]
    choice = Choice(nodes[0], standings=[{"node": str(index)} for index in (0, 3, 2, 5, 4, 1)])
    rivals = list_rivals(spec, root, choice)
    groups = [[nodes[0], nodes[2]], [nodes[4]]]
    # The fourth, the sixth and the second have the same text.
    assert [one.node for one in choose_alternatives(spec, choice, rivals, groups)] == [nodes[3], nodes[4]]


async def test_a_cancelled_job_has_alternatives_from_its_journal() -> None:
    for strategy in ("self_consistency", "best_of_n"):
        spec, journal = job(strategy, alternatives=3), MemoryJournal()
        whole = await run_job(spec, ScriptedEngine(), journal)
        best = choose_best_so_far(spec, journal.entries)
        assert best is not None
        assert [one.node for one in best.solutions] == [one.node for one in whole.result.solutions]
        early = choose_best_so_far(spec, journal.entries[:12])
        assert early is not None
        assert len({one.answer for one in early.solutions}) == len(early.solutions) > 1


async def test_a_replay_has_the_same_alternatives_and_costs_nothing() -> None:
    journal, spec = MemoryJournal(), job("weighted_vote", alternatives=3)
    first = await run_job(spec, ScriptedEngine(), journal)
    again = await run_job(spec, ScriptedEngine(die_after=0), journal)
    assert again.result == first.result
    assert len(first.result.alternatives) > 1


async def test_a_search_of_one_answer_has_no_alternatives() -> None:
    class Certain(ScriptedEngine):
        def token(self, branch: Branch, position: int, temperature: float) -> int:
            return 2 if position % 3 == 0 else super().token(branch, position, temperature)

    result = (await run_job(job("self_consistency", alternatives=7), Certain(), MemoryJournal())).result
    assert len(result.votes) == 1
    assert result.alternatives == []
