"""Tasks of the optional package reasoning-gym, which generate their problems and score answers.

Source: Stojanovski et al. 2025, "Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable
Rewards".
"""

from __future__ import annotations

import difflib
from typing import Any

from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.suites.files import INSTRUCTION, TEMPERATURE
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.spec import MAX_PROBLEM_CHARS

PREFIX = "reasoning-gym:"
FULL = 1.0
"""Score of a right answer. Tasks give partial scores to answers that are close or only well-formed."""


def open_task(task: str, limit: int, seed: int) -> Suite:
    """Return ``limit`` problems of a task. Raises ``SuiteError`` for an unknown task or if the package is missing."""
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise SuiteError(
            f"{PREFIX}{task} needs the package reasoning-gym: pip install 'reasoner[gym]' ({error})"
        ) from None
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=5, cutoff=0.4)
        raise SuiteError(
            f"reasoning-gym has no task {task!r}; {'near it: ' + ', '.join(near) if near else _some(DATASETS)}"
        )
    try:
        dataset = create_dataset(task, size=limit, seed=seed)
    except (AssertionError, ValueError) as error:
        raise SuiteError(f"{PREFIX}{task} cannot be made with its defaults: {error}") from None
    entries: dict[str, dict[str, Any]] = {}
    problems = []
    for index, entry in enumerate(dataset):
        text = f"{entry['question'].strip()}\n\n{INSTRUCTION}"
        if len(text) > MAX_PROBLEM_CHARS:
            raise SuiteError(f"{PREFIX}{task}, problem {index}: longer than {MAX_PROBLEM_CHARS} characters")
        answer = entry.get("answer")
        problem = Problem(f"{task}-{seed}-{index}", PREFIX + task, "", text, "" if answer is None else str(answer), {})
        entries[problem.id] = entry
        problems.append(problem)

    async def rule(problem: Problem, answer: str, equal: Equivalence) -> bool:  # noqa: ARG001
        try:
            score = dataset.score_answer(answer=answer, entry=entries[problem.id])
        except Exception:  # some tasks raise errors for malformed answers
            return False
        return float(score) >= FULL

    return Suite(PREFIX + task, problems, rule, TEMPERATURE, "text")


def _some(tasks: dict[str, Any]) -> str:
    return f"it has {len(tasks)}, {', '.join(sorted(tasks)[:5])} among them"
