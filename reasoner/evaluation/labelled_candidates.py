"""Candidates that were drawn elsewhere: read from a file, ranked question by question, and measured by gold answers.

One JSON object a line: ``question`` (or ``problem``), ``candidates``, a list of texts or of conversations, and for the
measurement ``answer`` (or ``gold``), the right answer alone or at the end of a solution as in GSM8K (``#### 72``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engine.text.json_lines import NotUtf8, read_json_lines
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.answers.votes import count_votes, group_equivalent
from reasoner.evaluation.runs import ItemFile
from reasoner.evaluation.statistics import wilson_interval
from reasoner.evaluation.suites.files.gsm8k import read_gold
from reasoner.evaluation.suites.suite import SuiteError
from reasoner.jobs.candidate_spec import Candidates
from reasoner.jobs.job import RankedCandidate
from reasoner.search.candidates import select_candidates
from reasoner.strategies.base import choose_best_scored, elect
from reasoner.subprocess_pool import keep_workers_alive
from reasoner.tree import Node

RANKINGS_FILE = "rankings.jsonl"
_CANDIDATES: TypeAdapter[Any] = TypeAdapter(Candidates)
_QUESTION_FIELDS, _GOLD_FIELDS = ("question", "problem"), ("answer", "gold")


@dataclass(frozen=True, slots=True)
class LabelledCandidates:
    """A question with candidates; ``gold`` is the right answer, ``None`` if the file has none."""

    id: str
    question: str
    candidates: list[Any]
    gold: str | None

    def to_spec(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of the job that ranks the candidates."""
        return {"problem": self.question, "candidates": self.candidates, **fields}


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


def read_questions(path: Path, limit: int | None = None) -> list[LabelledCandidates]:
    """Return the questions of a file. Raises ``SuiteError`` that names the line and what would be right."""
    questions: list[LabelledCandidates] = []
    try:
        lines = list(read_json_lines(path))
    except (OSError, NotUtf8) as error:
        raise SuiteError(f"{path}: {error}") from None
    for number, line in lines:
        if limit is None or len(questions) < limit:
            questions.append(_parse(f"{path}, line {number}", f"{path.stem}-{number}", line))
    if not questions:
        raise SuiteError(f"{path} holds no question: it needs one JSON object a line")
    return questions


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


def _parse(where: str, name: str, line: str) -> LabelledCandidates:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SuiteError(f"{where}: not JSON ({error}); each line is one JSON object") from None
    if not isinstance(record, dict):
        raise SuiteError(f"{where}: {type(record).__name__} instead of a JSON object")
    question = next((record[field] for field in _QUESTION_FIELDS if field in record), None)
    if not isinstance(question, str) or not question.strip():
        raise SuiteError(f"{where}: it needs a text 'question' (or 'problem'); its fields are {', '.join(record)}")
    if "candidates" not in record:
        raise SuiteError(f"{where}: it needs 'candidates', a list of texts or conversations")
    try:
        _CANDIDATES.validate_python(record["candidates"])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("candidates", *first["loc"])))
        raise SuiteError(f"{where}, field {place!r}: {first['msg']}") from None
    gold = next((record[field] for field in _GOLD_FIELDS if field in record), None)
    if gold is not None and not isinstance(gold, str | int | float):
        raise SuiteError(f"{where}, field 'answer': {gold!r} must be a text or a number")
    return LabelledCandidates(
        name, question.strip(), record["candidates"], None if gold is None else read_gold(str(gold))
    )
