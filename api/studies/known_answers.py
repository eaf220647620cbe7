"""Problems with known answers for rollouts: training problems of a bundled suite, or of a JSONL file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from prm.records import BadRecord, JsonRecord, read_records
from prm.rollouts.rollouts import RolloutProblem
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.extraction.extract import extract_answer, find_answer
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.calibrate.trials import GYM_SEED
from reasoner.evaluation.suites import registry
from reasoner.evaluation.suites.gym import PREFIX
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite, SuiteError

SUITE_PROBLEMS = 200
TASK_SEED = 2_000_003
"""Seed of the problems that reasoning-gym generates for rollouts; a fit of ``auto`` and evaluations have others."""


@dataclass(slots=True)
class LabelledProblems:
    """``count`` problems, read lazily. Use as an async context manager to judge solutions."""

    count: int
    _read: Callable[[], Iterator[tuple[RolloutProblem, str | Problem]]]
    _answers: dict[str, str | Problem] = field(default_factory=dict)
    _equivalence: Equivalence = field(default_factory=Equivalence)
    _task: Suite | None = None
    """The task of reasoning-gym, which checks its answers."""
    answer_spec: AnswerSpec = field(default_factory=AnswerSpec)
    """Specification of answers, by which they are asked for and extracted."""
    _judge_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def open(cls, name: str, limit: int | None, seed: int) -> LabelledProblems:
        """Open a suite or a JSONL file by name. Every line of a file is checked now. Raises ``BadRecord``."""
        if name in registry.SUITES:
            count = SUITE_PROBLEMS if limit is None else limit
            return cls(count, lambda: _read_suite(name, count, seed), answer_spec=AnswerSpec(compare="text"))
        if name.startswith(PREFIX):
            return cls._open_task(name, SUITE_PROBLEMS if limit is None else limit, seed)
        path = Path(name)
        if not path.is_file():
            raise BadRecord(f"{name!r} is neither a suite ({', '.join(registry.SUITES)}, {PREFIX}TASK) nor a file")
        count = sum(1 for _ in islice(_read_file(path), limit))
        if not count:
            raise BadRecord(f"{path} contains no problem: write one JSON object a line")
        return cls(count, lambda: islice(_read_file(path), limit))

    @classmethod
    def _open_task(cls, name: str, limit: int, seed: int) -> LabelledProblems:
        try:
            task = registry.open_suite(name, limit=limit, seed=TASK_SEED + seed, apart_from=(0, GYM_SEED))
        except SuiteError as error:
            raise BadRecord(str(error)) from None
        read = [(RolloutProblem(problem.id, problem.text, problem.examples), problem) for problem in task.problems]
        return cls(len(read), lambda: iter(read), _task=task, answer_spec=task.answer_spec)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._equivalence.__aexit__(kind, error, trace)

    def problems(self) -> Iterator[RolloutProblem]:
        """Yield all problems."""
        for problem, answer in self._read():
            self._answers[problem.key] = answer
            yield problem

    async def judge(self, problem: RolloutProblem, text: str, finished: bool) -> bool:
        """Return True if a solution of a yielded problem states the right answer.

        Answers are extracted as in a job, and compared by the exact rule of the suite, or as mathematics.
        """
        answer = self._answers[problem.key]
        stated = find_answer(text, self.answer_spec, "end" if finished else "inside")
        if stated is None:
            return False
        if isinstance(answer, Problem) and self._task is not None:
            return await self._task.check(answer, stated.text, self._equivalence)
        if isinstance(answer, Problem):
            return registry.check_answer(answer, stated.text)
        async with self._judge_lock:
            return await self._equivalence.are_same(answer, stated.text)


def _read_suite(name: str, count: int, seed: int) -> Iterator[tuple[RolloutProblem, Problem]]:
    """Yield training problems, never held-out ones, with the levels in turn."""
    family = registry.get_family(name)
    for index in range(count):
        problem: Problem = family.generate_problem(
            "train", f"rollouts/{seed}/{index}", family.LEVELS[index % len(family.LEVELS)]
        )
        yield RolloutProblem(problem.id, problem.text), problem


def _read_file(path: Path) -> Iterator[tuple[RolloutProblem, str]]:
    for number, record in enumerate(read_records(path), 1):
        name = record.fields.get("id", number)
        yield RolloutProblem(str(name), record.text("question")), _read_answer(record)


def _read_answer(record: JsonRecord) -> str:
    """Return the final answer: after ``####`` (GSM8K), in ``\\boxed`` (MATH), or the whole text."""
    text = record.text("answer")
    answer = text.rpartition("####")[2].strip() if "####" in text else extract_answer(text) or text.strip()
    if not answer:
        raise record.wrong("answer", "a text with an answer behind '####'")
    return answer
