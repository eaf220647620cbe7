"""Registry of suites: the bundled families, files, and the tasks of reasoning-gym."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.suites import arithmetic, countdown, words
from reasoner.evaluation.suites.files import open_file
from reasoner.evaluation.suites.gym import PREFIX, open_task
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite, SuiteError

_FAMILIES: dict[str, ModuleType] = {"countdown": countdown, "words": words, "arithmetic": arithmetic}
SUITES = tuple(_FAMILIES)
POLICY_SUITES = ("countdown", "words")
"""Suites on which the bundled policies without Python, their drafts and their verifier were trained."""
DEFAULT_SIZE = 600


def open_suite(where: str, *, limit: int, seed: int = 0, apart_from: Sequence[int] = ()) -> Suite:
    """Open a bundled suite, a ``.jsonl`` file or ``reasoning-gym:TASK``, with at most ``limit`` problems.

    Another ``seed`` generates other problems, except from a file; problems of reasoning-gym are distinct, and none is
    among those of the seeds ``apart_from``. Raises ``SuiteError``.
    """
    if where.startswith(PREFIX):
        return open_task(where.removeprefix(PREFIX), limit, seed, apart_from=apart_from)
    if where in SUITES:
        return Suite(
            where,
            load_problems(where, limit=limit, seed=seed),
            rule=_check_bundled,
            temperature=get_family(where).TEMPERATURE,
            answer="text",
        )
    if where.endswith((".jsonl", ".json")) or Path(where).exists():
        return open_file(Path(where), limit)
    raise SuiteError(f"unknown suite {where!r}: give {', '.join(SUITES)}, a .jsonl file or {PREFIX}TASK")


async def _check_bundled(problem: Problem, answer: str, equal: Equivalence) -> bool:  # noqa: ARG001
    return check_answer(problem, answer)


def get_family(name: str) -> ModuleType:
    """Return the module of a bundled suite. Raises ``ValueError`` for an unknown name."""
    try:
        return _FAMILIES[name]
    except KeyError:
        raise ValueError(f"unknown suite {name!r}; known suites: {', '.join(SUITES)}") from None


def load_problems(name: str, *, limit: int | None = None, seed: int = 0) -> list[Problem]:
    """Return distinct held-out problems, cycling through the levels so that every prefix is balanced.

    Another ``seed`` samples other held-out problems. Raises ``ValueError`` for an unknown name or a negative limit.
    """
    suite = get_family(name)
    count = DEFAULT_SIZE if limit is None else limit
    if count < 0:
        raise ValueError(f"limit must not be negative, got {limit}")
    problems: list[Problem] = []
    seen: set[str] = set()
    attempt = 0
    while len(problems) < count:
        level = suite.LEVELS[len(problems) % len(suite.LEVELS)]
        problem: Problem = suite.generate_problem("heldout", f"{seed}/{attempt}", level)
        attempt += 1
        if problem.id not in seen or attempt > 20 * count:
            seen.add(problem.id)
            problems.append(problem)
    return problems


def check_answer(problem: Problem, answer: str | None) -> bool:
    """Return True if ``answer``, the content of the box, passes the exact check of the problem's suite."""
    return bool(get_family(problem.suite).check(problem, answer))
