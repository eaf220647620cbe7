"""Grades: the expectation over a scale of grade tokens, read from the next-token distribution at one position.

A question asks for a grade, the text ``LEAD`` begins the answer, and the log-probabilities of all grades are read
behind it in one forward pass. Nothing is sampled, so the same question has the same grade; repeats ask it in other
words, every other one with the scale the other way round, whose preference for a letter then cancels out. All
questions come behind what is graded, so that a cache holds the problem and the solution.

A server that only chats is asked in its conversation, and where it lists no log-probabilities the written grade counts.

Source: Kwok et al. 2026, "LLM-as-a-Verifier" (granularity, repeated verification and criteria of grades A to T); the
expectation instead of the likeliest grade as in Liu et al. 2023, "G-Eval", section 2.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.adapters.judge import find_judge
from engine.protocol.types import (
    Capability,
    EngineClient,
    InvalidRequest,
    ModelInfo,
    ScoreItem,
    ScoreRequest,
    TextToken,
    Token,
    Tokens,
)
from prm.scorers.labels import find_label_tokens
from prm.scorers.steps import VerifierScores

LEAD = "Grade: "
ANSWER_ALONE = "Answer with the grade alone."
"""Added to questions where the answer cannot be begun."""
MIN_GRADE_MASS = 0.05
"""Probability that all grades together must have to be read: where a model gives one it is far more than half."""
_QUESTIONS = (
    "Grade this solution {scale}.",
    "Is its final answer right? Give a grade {scale}.",
    "Check each of its steps again, then grade it {scale}.",
    "Would an examiner accept it? Grade it {scale}.",
)
_UNFINISHED_QUESTIONS = (
    "The solution is unfinished. Grade it so far {scale}.",
    "It is not finished yet. Will it reach the right answer? Give a grade {scale}.",
    "It is unfinished. Check each of its steps again, then grade them {scale}.",
    "It is unfinished. Should it go on like this? Grade it {scale}.",
)
_TURN_QUESTIONS = (
    "Grade this turn, its calls included, {scale}.",
    "Are its calls and their arguments right? Give a grade {scale}.",
    "Is it the best next turn towards what the user wants? Grade it {scale}.",
    "Would an expert reviewer accept this turn? Grade it {scale}.",
)
Subject = Literal["solution", "unfinished solution", "turn"]
"""The text that is graded; a turn may call functions of the client."""
_BY_SUBJECT: Mapping[Subject, Sequence[str]] = {
    "solution": _QUESTIONS,
    "unfinished solution": _UNFINISHED_QUESTIONS,
    "turn": _TURN_QUESTIONS,
}
MAX_REPEATS = 2 * len(_QUESTIONS)


@dataclass(frozen=True, slots=True)
class GradeQuestion:
    """A question for one grade. ``is_reversed``: the first grade of its scale is the best one."""

    text: str
    is_reversed: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Grades with their scores from 0 to 1, the worst first."""

    scores: Mapping[str, float]

    def describe(self, *, is_reversed: bool, worst: str, best: str) -> str:
        """Return the scale in words; ``worst`` and ``best`` are the meanings of its ends."""
        names = list(self.scores)
        first, last = (best, worst) if is_reversed else (worst, best)
        listed = "" if _is_series(names) else f" ({', '.join(names)})"
        return f"from {names[0]} ({first}) to {names[-1]} ({last}){listed}"


def _is_series(names: Sequence[str]) -> bool:
    """Return True for successive letters or numbers, whose ends say which others there are."""
    if all(name.isdecimal() for name in names):
        values = [int(name) for name in names]
    elif all(len(name) == 1 and name.isascii() and name.isalpha() for name in names):
        values = [ord(name) for name in names]
    else:
        return False
    return values == list(range(values[0], values[0] + len(values)))


def write_question(scale: Scale, repeat: int, criterion: str | None, subject: Subject) -> GradeQuestion:
    """Return the question of a repeat (from 0) about one solution or turn, by a criterion or as a whole."""
    is_reversed = repeat % 2 == 1
    questions = _BY_SUBJECT[subject]
    text = questions[repeat // 2 % len(questions)].format(scale=_describe_scale(scale, criterion, is_reversed))
    if criterion is not None:
        text = f"Judge by this criterion alone: {criterion}\n{text}"
    return GradeQuestion(text, is_reversed)


def write_pair_question(scale: Scale, repeat: int, criterion: str | None, number: int) -> GradeQuestion:
    """Return the question about solution ``number`` (1 or 2) of a pair."""
    is_reversed = repeat % 2 == 1
    text = f"Grade solution {number} {_describe_scale(scale, criterion, is_reversed)}."
    if criterion is not None:
        text = f"Judge by this criterion alone: {criterion}\n{text}"
    return GradeQuestion(text, is_reversed)


def _describe_scale(scale: Scale, criterion: str | None, is_reversed: bool) -> str:
    worst, best = ("wrong", "right") if criterion is None else ("not met", "fully met")
    return scale.describe(is_reversed=is_reversed, worst=worst, best=best)


class GradeReader:
    """Reads grades with one served model."""

    def __init__(
        self, engine: EngineClient, info: ModelInfo, scale: Scale, tokens: Tokens, lead: Tokens, pin_key: str | None
    ) -> None:
        self.info = info
        self.lead = lead
        """Tokens with which the answer to each question begins; none on a server that only chats."""
        self._engine = engine
        self._tokens = tokens
        self._scores = list(scale.scores.values())
        self._pin_key = pin_key

    @classmethod
    async def open(cls, engine: EngineClient, info: ModelInfo, scale: Scale, pin_key: str | None = None) -> GradeReader:
        """Return a reader; an adapter that was trained to judge has a scale of its own.

        Raises ``InvalidRequest`` for grades that are not single tokens of the model.
        """
        if Capability.CONTINUATION not in info.capabilities:
            return cls(engine, info, scale, tokens=tuple(map(TextToken, scale.scores)), lead=(), pin_key=pin_key)
        if (judge := find_judge(info)) is not None:
            own = Scale({"No": 0.0, "Yes": 1.0})
            return cls(engine, info, own, tokens=(judge.negative, judge.positive), lead=(), pin_key=pin_key)
        found = await find_label_tokens(engine, info.id, LEAD, scale.scores)
        if found.others:
            single = ", ".join(found.tokens) if len(found.tokens) > 1 else "none of them"
            raise InvalidRequest(
                f"verifier.grades: behind {LEAD.strip()!r} the tokenizer of model {info.id!r} does not write "
                f"{', '.join(found.others)} as one token each, different from the others; those that it does are "
                f"{single}: give grades that are, such as letters or digits",
                "verifier.grades",
            )
        tokens: list[Token] = [found.tokens[grade] for grade in scale.scores]
        return cls(engine, info, scale, tokens=tuple(tokens), lead=found.lead, pin_key=pin_key)

    async def read(
        self, items: Sequence[ScoreItem], questions: Sequence[GradeQuestion], max_compute: int | None = None
    ) -> list[VerifierScores]:
        """Return the grade behind each item, a prompt that ends with its question and the lead.

        ``max_compute`` bounds the tokens computed for one of them. A grade that cannot be read has no score.
        """
        request = ScoreRequest(
            uuid.uuid4().hex,
            self.info.id,
            items=tuple(items),
            token_ids=self._tokens,
            max_compute=max_compute,
            pin_key=self._pin_key,
            normalized=True,
        )
        readings = []
        for result, question in zip(await self._engine.score(request), questions, strict=True):
            scores, unread = None, result.unread
            if result.values is not None:
                grade = self._expect_grade(result.values[0], question) if result.values else None
                scores = () if grade is None else (grade,)
                unread = unread or ("the grades are unlikely where one is due" if grade is None else None)
            readings.append(VerifierScores(scores, result.computed_tokens, result.cached_tokens, unread))
        return readings

    def _expect_grade(self, logprobs: Sequence[float], question: GradeQuestion) -> float | None:
        """Return the expected score of the grades; ``None`` if they are unlikely."""
        weights = [math.exp(value) for value in logprobs]
        mass = math.fsum(weights)
        if mass < MIN_GRADE_MASS:
            return None
        scores = self._scores[::-1] if question.is_reversed else self._scores
        return math.fsum(weight * score for weight, score in zip(weights, scores, strict=True)) / mass
