"""Registry of suites: bundled ones, files, and the tasks of reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.suites import arithmetic, countdown, extraction, tool_calls, words
from reasoner.evaluation.suites.files.humaneval import find_packaged_file
from reasoner.evaluation.suites.files.records import SUFFIXES
from reasoner.evaluation.suites.files.registry import FORMATS, open_file
from reasoner.evaluation.suites.gym import PREFIX, open_task
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite, SuiteError

_FAMILIES: dict[str, ModuleType] = {"countdown": countdown, "words": words, "arithmetic": arithmetic}
SUITES = tuple(_FAMILIES)
"""Suites with a split into training and held-out problems, and with solutions to train on."""
POLICY_SUITES = ("countdown", "words")
"""Suites on which the bundled policies without Python, their drafts and their verifier were trained."""
DEFAULT_SIZE = 600


def open_suite(where: str, *, limit: int, seed: int = 0, apart_from: Sequence[int] = ()) -> Suite:
    """Open a bundled suite, a file or ``FORMAT:FILE``, or ``reasoning-gym:TASK``, with at most ``limit`` problems.

    Another ``seed`` generates other problems, and shuffles the choices of a file otherwise; problems of reasoning-gym
    are distinct, and none is among those of the seeds ``apart_from``. Raises ``SuiteError``.
    """
    if where.startswith(PREFIX):
        return open_task(where.removeprefix(PREFIX), limit, seed, apart_from=apart_from)
    if where in BUNDLED:
        return BUNDLED[where](limit, seed)
    format_name, _, path = where.partition(":")
    if path and format_name in FORMATS:
        return open_file(Path(path), limit, seed, format_name)
    if where.endswith(SUFFIXES) or Path(where).exists():
        return open_file(Path(where), limit, seed)
    raise SuiteError(
        f"unknown suite {where!r}: give {', '.join(BUNDLED)}, a file ({', '.join(SUFFIXES)}), its form and a file "
        f"({', '.join(FORMATS)}, as in aime:FILE) or {PREFIX}TASK"
    )


def _open_family(name: str, limit: int, seed: int) -> Suite:
    return Suite(
        name,
        load_problems(name, limit=limit, seed=seed),
        rule=_check_bundled,
        temperature=get_family(name).TEMPERATURE,
        answer=AnswerSpec(compare="text"),
    )


BUNDLED: Mapping[str, Callable[[int, int], Suite]] = {
    **{name: partial(_open_family, name) for name in SUITES},
    "extraction": extraction.open_suite,
    "extraction-held": partial(extraction.open_suite, is_held=True),
    "tools": tool_calls.open_suite,
    "humaneval": lambda limit, seed: open_file(find_packaged_file(), limit, seed, "humaneval"),
}
"""Functions of the number of problems and the seed that open a suite by its name."""


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
