"""Problems whose answers are known, for rollouts: training problems of a bundled suite, or a file of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from prm.records import BadRecord, Record, read_records
from prm.rollouts.rollouts import Problem
from reasoner.answers.canonical import canonicalize
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.extraction.extract import extract_answer
from reasoner.evaluation.suites import registry

SUITE_PROBLEMS = 200


@dataclass(slots=True)
class Known:
    """``count`` problems that are read when they are asked for. Use as an async context manager to judge."""

    count: int
    _read: Callable[[], Iterator[tuple[Problem, str | registry.Problem]]]
    _answers: dict[str, str | registry.Problem] = field(default_factory=dict)
    _equivalence: Equivalence = field(default_factory=Equivalence)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def open(cls, name: str, limit: int | None, seed: int) -> Known:
        """A suite's name, or a JSONL file's, every line of which is checked now. Raises ``BadRecord``."""
        if name in registry.SUITES:
            count = SUITE_PROBLEMS if limit is None else limit
            return cls(count, lambda: _of_suite(name, count, seed))
        path = Path(name)
        if not path.is_file():
            raise BadRecord(f"{name!r} is neither a suite ({', '.join(registry.SUITES)}) nor a file")
        count = sum(1 for _ in islice(_of_file(path), limit))
        if not count:
            raise BadRecord(f"{path} holds no problem")
        return cls(count, lambda: islice(_of_file(path), limit))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._equivalence.__aexit__(kind, error, trace)

    def problems(self) -> Iterator[Problem]:
        """All problems, one at a time."""
        for problem, answer in self._read():
            self._answers[problem.key] = answer
            yield problem

    async def judge(self, problem: Problem, text: str) -> bool:
        """Whether a solution of a problem that was handed out states the right answer: by the suite's exact rule, or as
        mathematics."""
        stated, answer = extract_answer(text), self._answers[problem.key]
        if isinstance(answer, registry.Problem):
            return registry.check_answer(answer, stated)
        if stated is None:
            return False
        async with self._one_at_a_time:
            return await self._equivalence.equal(canonicalize(answer), canonicalize(stated))


def _of_suite(name: str, count: int, seed: int) -> Iterator[tuple[Problem, registry.Problem]]:
    """Training problems, never held-out ones, the levels in turn."""
    family = registry.get_family(name)
    for index in range(count):
        one: registry.Problem = family.generate_problem(
            "train", f"rollouts/{seed}/{index}", family.LEVELS[index % len(family.LEVELS)]
        )
        yield Problem(one.id, one.text), one


def _of_file(path: Path) -> Iterator[tuple[Problem, str]]:
    for number, record in enumerate(read_records(path), 1):
        name = record.fields.get("id", number)
        yield Problem(str(name), record.text("question")), _answer(record)


def _answer(record: Record) -> str:
    """The final answer: behind GSM8K's ``####``, in MATH's box, or the whole text."""
    text = record.text("answer")
    behind = text.rpartition("####")[2].strip() if "####" in text else extract_answer(text) or text.strip()
    if not behind:
        raise record.wrong("answer", "a text with an answer behind '####'")
    return behind
