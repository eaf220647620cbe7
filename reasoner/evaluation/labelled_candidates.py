"""Candidates that were drawn elsewhere: ranked question by question, and measured by right answers.

``logs`` reads the files that have them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from pydantic import TypeAdapter

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.answers.votes import count_votes, group_equivalent
from reasoner.evaluation.logs.log_format import LabelledCandidates
from reasoner.evaluation.runs import ItemFile
from reasoner.evaluation.statistics import wilson_interval
from reasoner.jobs.job import RankedCandidate
from reasoner.search.candidates import select_candidates
from reasoner.strategies.base import choose_best_scored, elect
from reasoner.subprocess_pool import keep_workers_alive
from reasoner.tree import Node

RANKINGS_FILE = "rankings.jsonl"


@dataclass(frozen=True, slots=True)
class RankedQuestion:
    """The ranking of one question's candidates, or the reason why there is none."""

    question: str
    ranking: list[RankedCandidate]
    answer: str | None = None
    verifier_tokens: int = 0
    failed: str | None = None


class RankingFile(ItemFile[RankedQuestion]):
    """The rankings of a file, each on a line of its own as soon as it is there."""

    name = RANKINGS_FILE
    adapter = TypeAdapter(RankedQuestion)


@dataclass(frozen=True, slots=True)
class RuleAccuracy:
    """Number of questions for which a rule chose a right candidate, with the share's 95 % interval (Wilson)."""

    rule: str
    right: int
    accuracy: float
    low: float
    high: float


def identify(questions: Sequence[LabelledCandidates]) -> str:
    """Return a digest of the questions and their candidates."""
    content = blake2b(digest_size=8)
    for question in questions:
        content.update(repr(question).encode())
    return content.hexdigest()


async def rank_questions(
    questions: Sequence[LabelledCandidates],
    rank: Callable[[LabelledCandidates], Awaitable[RankedQuestion]],
    file: RankingFile,
    concurrency: int,
    advance: Callable[[int], None],
) -> None:
    """Add the rankings that the file lacks, several at a time. ``advance`` is called with the number of all of them."""
    done = {item.question for item in file.items}
    todo = iter([question for question in questions if question.id not in done])
    advance(len(file.items))

    async def work() -> None:
        for question in todo:
            file.add(await rank(question))
            advance(len(file.items))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except* Exception as errors:
        raise errors.exceptions[0] from None


async def measure_rules(
    questions: Sequence[LabelledCandidates], rankings: Sequence[RankedQuestion], spec: AnswerSpec
) -> list[RuleAccuracy]:
    """Return the accuracy of each rule on the questions that have a right answer and a ranking.

    ``first`` takes the first candidate, ``majority`` the most frequent answer, ``weighted`` the one with the largest
    sum of scores, ``best`` the highest score, ``ranked`` the first of the ranking, ``oracle`` any that is right.
    """
    by_id = {item.question: item for item in rankings if item.failed is None}
    measured = [question for question in questions if question.gold is not None and question.id in by_id]
    counts: dict[str, int] = {}
    with keep_workers_alive():
        for question in measured:
            equivalence = Equivalence()
            for rule, answers in (await _choose_by_rules(by_id[question.id], spec, equivalence)).items():
                is_right = await _is_right_any(answers, question.gold or "", spec, equivalence)
                counts[rule] = counts.get(rule, 0) + is_right
    total = len(measured)
    shares = {rule: right / total for rule, right in counts.items()}
    return [RuleAccuracy(rule, counts[rule], share, *wilson_interval(share, total)) for rule, share in shares.items()]


async def _choose_by_rules(
    ranked: RankedQuestion, spec: AnswerSpec, equivalence: Equivalence
) -> dict[str, list[str | None]]:
    """Return for each rule the answer that it chooses; for the oracle all of them."""
    nodes = []
    for item in sorted(ranked.ranking, key=lambda item: item.index):
        node = Node((item.index,), None, (), answer=item.answer, score=item.score)
        node.answer_level = item.answer_level
        nodes.append(node)
    voters = select_candidates(nodes, None)
    groups = await group_equivalent(voters, spec, equivalence)

    def vote(weights: dict[Node, float]) -> list[str | None]:
        return [_read_answer(elect(count_votes(groups, weights), weights).node)]

    chosen = {"first": [nodes[0].answer], "majority": vote(dict.fromkeys(voters, 1.0))}
    if any(node.score is not None for node in nodes):
        chosen["weighted"] = vote({node: node.score or 0.0 for node in voters})
        chosen["best"] = [_read_answer(choose_best_scored(voters).node)]
    return {**chosen, "ranked": [ranked.answer], "oracle": [node.answer for node in nodes]}


def _read_answer(node: Node | None) -> str | None:
    return None if node is None else node.answer


async def _is_right_any(answers: Sequence[str | None], gold: str, spec: AnswerSpec, equivalence: Equivalence) -> bool:
    """Return True if an answer is equal to the right one, as in a vote."""
    for answer in dict.fromkeys(answers):
        if answer is not None and await equivalence.are_same(answer, gold, spec.compare):
            return True
    return False
