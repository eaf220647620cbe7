"""Tasks of the optional package reasoning-gym, which generate their problems and score answers.

Source: Stojanovski et al. 2025, "Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable
Rewards".
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Collection, Iterable
from typing import Any

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.evaluation.suites.files.file_format import TEMPERATURE
from reasoner.evaluation.suites.problem import Examples, Problem
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.messages import MAX_PROBLEM_CHARS

PREFIX = "reasoning-gym:"
DEFAULT_SIZE = 600
"""Number of problems of an evaluation that are kept apart from those of a fit."""
ATTEMPTS = 10
"""Generated entries per problem asked for, after which a task counts as exhausted."""
SHOTS = "shots"
"""Parameter beside the task's own: number of solved problems before the question, as turns of the chat."""
SHOTS_SEED = 1_000_001
MAX_SHOTS = 16
FULL = 1.0
"""Score of a right answer. Tasks give partial scores to answers that are close or only well-formed."""


def open_task(name: str, limit: int, seed: int, *, apart_from: Iterable[int] = ()) -> Suite:
    """Return at most ``limit`` distinct problems of a task, named with its parameters: ``chain_sum?max_terms=2``.

    Problems that the seeds ``apart_from`` generate for an evaluation of usual size are left out. Raises ``SuiteError``
    for an unknown task or parameter, or if the package is missing.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise SuiteError(
            f"{PREFIX}{name} needs the package reasoning-gym: pip install 'reasoner[gym]' ({error})"
        ) from None
    task, _, settings = name.partition("?")
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=5, cutoff=0.4)
        raise SuiteError(
            f"reasoning-gym has no task {task!r}; {'near it: ' + ', '.join(near) if near else _list_some(DATASETS)}"
        )
    params = _parse_params(name, settings, DATASETS[task][1])
    shots = params.pop(SHOTS, 0)
    if not (isinstance(shots, int) and 0 <= shots <= MAX_SHOTS):
        raise SuiteError(f"{PREFIX}{name}: {SHOTS}={shots} must be a whole number from 0 to {MAX_SHOTS}")
    examples = _make_examples(name, task, params, shots)
    taken = {question for question, _ in examples}
    for other in apart_from:
        others = _generate(name, task, params=params, limit=DEFAULT_SIZE, seed=other, taken=taken)[1]
        taken.update(entry["question"].strip() for entry in others)
    dataset, generated = _generate(name, task, params=params, limit=limit, seed=seed, taken=taken)
    entries: dict[str, dict[str, Any]] = {}
    problems = []
    for index, entry in enumerate(generated):
        text = entry["question"].strip()
        if len(text) > MAX_PROBLEM_CHARS:
            raise SuiteError(f"{PREFIX}{name}, problem {index}: longer than {MAX_PROBLEM_CHARS} characters")
        answer = "" if entry.get("answer") is None else str(entry["answer"])
        problem = Problem(
            f"{task}-{seed}-{index}", PREFIX + name, level="", text=text, answer=answer, data={}, examples=examples
        )
        entries[problem.id] = entry
        problems.append(problem)

    async def rule(problem: Problem, answer: str, equal: Equivalence) -> bool:  # noqa: ARG001
        try:
            score = dataset.score_answer(answer=answer, entry=entries[problem.id])
        except Exception:  # some tasks raise errors for malformed answers
            return False
        return float(score) >= FULL

    return Suite(PREFIX + name, problems, rule=rule, temperature=TEMPERATURE, answer=AnswerSpec(compare="text"))


def _parse_params(name: str, settings: str, config: Any) -> dict[str, Any]:
    """Parse ``KEY=VALUE&KEY=VALUE`` with values in JSON or plain text; the keys are fields of the task's config."""
    known = [field.name for field in dataclasses.fields(config) if field.name not in ("seed", "size")] + [SHOTS]
    params: dict[str, Any] = {}
    for setting in filter(None, settings.split("&")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise SuiteError(f"{PREFIX}{name}: {setting!r} is not KEY=VALUE; write TASK?KEY=VALUE&KEY=VALUE")
        if key not in known:
            raise SuiteError(f"{PREFIX}{name}: no parameter {key!r}; the task has {', '.join(known) or 'none'}")
        try:
            params[key] = json.loads(value)
        except ValueError:
            params[key] = value
    return params


def _make_examples(name: str, task: str, params: dict[str, Any], shots: int) -> Examples:
    """Return ``shots`` problems of the task with their answers, which no evaluation and no fit contains."""
    entries = _generate(name, task, params=params, limit=shots, seed=SHOTS_SEED, taken=())[1] if shots else []
    if any(entry.get("answer") is None for entry in entries):
        raise SuiteError(f"{PREFIX}{name}: the task states no answers, so that it has no {SHOTS}")
    return tuple((entry["question"].strip(), f"The answer is {entry['answer']}.") for entry in entries)


def _generate(
    name: str, task: str, params: dict[str, Any], limit: int, seed: int, taken: Collection[str]
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the task's dataset, and its first ``limit`` entries with distinct questions that are not ``taken``."""
    from reasoning_gym import create_dataset

    try:
        attempts = ATTEMPTS * limit + len(taken)
        dataset = create_dataset(task, size=attempts, seed=seed, **params)
        entries: dict[str, dict[str, Any]] = {}
        for index in range(attempts):
            if len(entries) == limit:
                break
            entry = dataset[index]
            question = entry["question"].strip()
            if question not in taken:
                entries.setdefault(question, entry)
    except Exception as error:  # whatever a generator raises on parameters that contradict each other
        given = ", ".join(f"{key}={value!r}" for key, value in params.items()) or "its defaults"
        raise SuiteError(f"{PREFIX}{name} cannot be made with {given}: {error or type(error).__name__}") from None
    return dataset, list(entries.values())


def _list_some(tasks: dict[str, Any]) -> str:
    return f"it has {len(tasks)}, {', '.join(sorted(tasks)[:5])} among them"
