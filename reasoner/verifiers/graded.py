"""Grades as a verifier: one position's distribution over grade tokens, on keys that are cached already.

In place, the question is the next turn of the branch itself, whose keys the policy computed when it wrote: only the
question's own tokens are computed, and the branch goes on without it. Otherwise the solution is shown in a prompt, and
what criteria and repeats ask comes after it, so that the first question alone computes the solution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.protocol.types import KeyBound, ScoreItem, Tokens
from prm.scorers.grades import GradeQuestion, GradeReader, Scale, Subject, write_pair_question, write_question
from prm.scorers.next_turn import count_common
from prm.scorers.steps import VerifierScores
from reasoner.budget.prices import NO_AMOUNT, Amount
from reasoner.budget.usage import Usage
from reasoner.jobs.verifier_specs import GradedVerifier
from reasoner.search.policies.thoughts import find_thought_format
from reasoner.search.scoring import (
    BudgetedReader,
    NodeScore,
    PairScore,
    aggregate_score,
    check_fits_context,
    ends_at_step,
    inherited_scores,
)
from reasoner.tree import Node
from reasoner.verifiers.context import ESTIMATE_SLACK_TOKENS, VerifierContext, estimate_new_tokens
from reasoner.verifiers.grade_prompts import GradePrompts, wrote_branches
from reasoner.verifiers.written import weigh_criteria

T = TypeVar("T")
Pair = tuple[Node, Node]


@dataclass(frozen=True, slots=True, eq=False)
class _Asked(Generic[T]):
    """A question about a solution or a pair, with its whole prompt and the bound on the keys of a branch in it."""

    item: T
    question: GradeQuestion
    prompt: Tokens
    key_bound: KeyBound | None = None


@dataclass(slots=True)
class _Graded:
    """The grades of one item, in the order of its questions, and their cost."""

    grades: list[float | None]
    unread: list[str | None]
    spend: Usage
    reserved: Amount = NO_AMOUNT


async def open_graded(context: VerifierContext) -> GradedScorer:
    """Raises ``InvalidRequest`` if the model is not served, or cannot be asked as the verifier says."""
    verifier = context.spec.verifier
    assert isinstance(verifier, GradedVerifier)
    model = context.policy if verifier.model is None else context.verifier_model()
    reader = await GradeReader.open(context.engine, model, Scale(verifier.grade_scores), context.pin_key)
    own_thoughts = context.spec.thoughts if wrote_branches(model, context) else None
    thoughts = await find_thought_format(context.engine, model, own_thoughts)
    prompts = GradePrompts(context, model, reader.lead, thoughts)
    scorer = GradedScorer(context, verifier, reader=reader, prompts=prompts)
    check_fits_context(model, await scorer.count_head())
    return scorer


class GradedScorer:
    """A ``NodeScorer`` for nodes whose text ends where a step does, and a ``PairScorer`` for a tournament."""

    def __init__(
        self, context: VerifierContext, verifier: GradedVerifier, reader: GradeReader, prompts: GradePrompts
    ) -> None:
        self._verifier = verifier
        self._scale = Scale(verifier.grade_scores)
        self._criteria: Sequence[str | None] = [criterion.text for criterion in verifier.criteria] or [None]
        self._reader = reader
        self._prompts = prompts
        self._budgeted = BudgetedReader(context.ledger, reader.info)
        self._has_functions = bool(context.spec.functions)
        self._head = 0

    async def count_head(self) -> int:
        """Return the number of tokens of the longest question about an empty solution."""
        questions = self._list_questions("unfinished solution")
        self._head = max([len(await self._prompts.encode_empty(question)) for question in questions])
        return self._head

    def scorable(self, node: Node) -> bool:
        return ends_at_step(node) and bool(node.text.strip()) and self._prompts.is_readable(node)

    async def score(self, nodes: Sequence[Node]) -> list[NodeScore]:
        asked: dict[Node, list[_Asked[Node]]] = {}
        estimates = {}
        for node in nodes:
            questions = self._list_questions(self._find_subject(node))
            bound = self._prompts.find_key_bound(node)
            asked[node] = [
                _Asked(node, question, await self._prompts.encode(node, question), bound) for question in questions
            ]
            estimates[node] = self._estimate(node, asked[node][0].prompt)
        graded = await self._grade(asked, estimates)
        return [self._build_score(node, found) for node, found in graded.items()]

    async def compare(self, pairs: Sequence[Pair]) -> list[PairScore]:
        asked: dict[Pair, list[_Asked[Pair]]] = {}
        for pair in pairs:
            orders = [pair, pair[::-1]] if self._verifier.swap else [pair]
            asked[pair] = [
                _Asked(
                    pair,
                    question,
                    await self._prompts.encode_pair(*order, number=number, question=question),
                    self._prompts.find_pair_bound(*order, number=number),
                )
                for order in orders
                for number, question in self._list_pair_questions()
            ]
        graded = await self._grade(asked, {pair: len(own[0].prompt) for pair, own in asked.items()})
        return [self._build_pair_score(pair, found) for pair, found in graded.items()]

    def _find_subject(self, node: Node) -> Subject:
        if node.open:
            return "unfinished solution"
        return "turn" if self._has_functions else "solution"

    def _list_questions(self, subject: Subject) -> list[GradeQuestion]:
        """Return the questions about one solution: all repeats of each criterion."""
        return [
            write_question(self._scale, repeat, criterion, subject)
            for criterion in self._criteria
            for repeat in range(self._verifier.repeats)
        ]

    def _list_pair_questions(self) -> list[tuple[int, GradeQuestion]]:
        """Return the questions about a pair: for all repeats of each criterion those about solution 1, solution 2."""
        return [
            (number, write_pair_question(self._scale, repeat, criterion, number))
            for criterion in self._criteria
            for repeat in range(self._verifier.repeats)
            for number in (1, 2)
        ]

    def _estimate(self, node: Node, prompt: Tokens) -> int:
        """Estimate the tokens that the first question computes: in place all but the branch's own."""
        if self._prompts.reads_branch:
            return len(prompt) - len(node.prefix) + ESTIMATE_SLACK_TOKENS
        return min(len(prompt), estimate_new_tokens(node, self._head, self._verifier.reads))

    async def _grade(self, asked: Mapping[T, Sequence[_Asked[T]]], estimates: Mapping[T, int]) -> dict[T, _Graded]:
        """Ask the questions about the first items, as many as the budget reaches.

        The first question about each item comes before the others, which find its prompt in the cache.
        """
        answers: dict[_Asked[T], tuple[VerifierScores, Amount]] = {}
        await self._read_all({own[0]: estimates[item] for item, own in asked.items()}, answers)
        rest = {
            question: len(question.prompt) - count_common(own[0].prompt, question.prompt) + ESTIMATE_SLACK_TOKENS
            for own in asked.values()
            for question in own[1:]
            if own[0] in answers
        }
        await self._read_all(rest, answers)
        return {
            item: self._collect([answers.get(question) for question in own])
            for item, own in asked.items()
            if own[0] in answers
        }

    async def _read_all(
        self, estimates: Mapping[_Asked[T], int], answers: dict[_Asked[T], tuple[VerifierScores, Amount]]
    ) -> None:
        """Add the answers to the first of these questions, as many as the budget reaches."""
        remaining = dict(estimates)
        while remaining:
            found = await self._budgeted.read(remaining, self._ask)
            if not found:
                return
            for question, reading, amount in found:
                answers[question] = reading, amount
                del remaining[question]

    async def _ask(self, asked: Sequence[_Asked[T]], bound: int | None) -> Sequence[VerifierScores]:
        items = [ScoreItem((question.prompt,), (0,), question.key_bound) for question in asked]
        return await self._reader.read(items, [question.question for question in asked], bound)

    def _collect(self, answers: Sequence[tuple[VerifierScores, Amount] | None]) -> _Graded:
        """Return the grades with their cost; a question that the budget did not reach has none."""
        found = _Graded([], [], Usage())
        for answer in answers:
            if answer is None:
                found.grades.append(None)
                found.unread.append("the budget did not reach it")
                continue
            reading, amount = answer
            found.grades.append(reading.scores[0] if reading.scores else None)
            found.unread.append(reading.unread)
            found.spend += self._budgeted.spend(reading)
            found.reserved += amount
        return found

    def _build_score(self, node: Node, found: _Graded) -> NodeScore:
        width = self._verifier.repeats
        by_criterion = [found.grades[start : start + width] for start in range(0, len(found.grades), width)]
        grades = [_mean(group) for group in by_criterion]
        score = weigh_criteria(self._verifier.criteria, grades)
        details = self._describe(found, grades)
        if score is None:
            return NodeScore(node, None, spend=found.spend, reserved=found.reserved, details=details)
        total = aggregate_score((*inherited_scores(node), score), self._verifier.aggregation)
        return NodeScore(node, total, (score,), spend=found.spend, reserved=found.reserved, details=details)

    def _build_pair_score(self, pair: Pair, found: _Graded) -> PairScore:
        """Return the score of a pair: one half and half of the difference of grades, over repeats and orders."""
        differences = [
            None if first is None or second is None else 0.5 + (first - second) / 2.0
            for first, second in zip(found.grades[::2], found.grades[1::2], strict=True)
        ]
        width, size = self._verifier.repeats, len(self._criteria) * self._verifier.repeats
        flipped = [None if score is None else 1.0 - score for score in differences[size:]]
        by_criterion = [
            _mean(differences[start : start + width] + flipped[start : start + width])
            for start in range(0, size, width)
        ]
        return PairScore(
            pair,
            weigh_criteria(self._verifier.criteria, by_criterion),
            spend=found.spend,
            reserved=found.reserved,
            details=self._describe(found, by_criterion),
        )

    def _describe(self, found: _Graded, grades: Sequence[float | None]) -> dict[str, object]:
        """Return the further fields of the journal entry: every grade, and the scores of the criteria."""
        details: dict[str, object] = {"grades": found.grades}
        if any(found.unread):
            details["unread"] = found.unread
        if self._verifier.criteria:
            names = [criterion.name for criterion in self._verifier.criteria]
            details["criteria"] = dict(zip(names, grades, strict=True))
        return details


def _mean(grades: Sequence[float | None]) -> float | None:
    """Return the mean of the grades that could be read; ``None`` if there are none."""
    read = [grade for grade in grades if grade is not None]
    return sum(read) / len(read) if read else None
