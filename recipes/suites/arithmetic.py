"""Solutions of the suite ``arithmetic``: written out, or with Python, and exact labels of the former's steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reasoner.evaluation.suites.arithmetic import check, compute_results
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.templates import TEMPLATES, Kind, Operation
from recipes.suites.steps import boxed

_SYMBOLS: dict[Kind, str] = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "remainder": "%"}
_VERBS: dict[Kind, str] = {
    "add": "add",
    "subtract": "subtract",
    "multiply": "multiply",
    "divide": "divide",
    "remainder": "take the remainder",
    "percent": "take the percentage",
}
INLINE = 0.2
"""Share of cells that are one expression instead of one line for each operation."""
SPLIT = 0.2
"""Share of solutions with Python that call it twice."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of Python in a solution."""

    plan: str
    code: str
    """Lines of the cell without a line break at the end; the last one prints."""
    output: str
    """Printed text without a line break at the end."""


def sample_solution(problem: Problem, rng: random.Random) -> list[str]:  # noqa: ARG001
    """Return the steps of the solution without Python; there is one for each problem."""
    operations = TEMPLATES[problem.data["template"]].operations
    numbers: dict[str, int] = problem.data["numbers"]
    return [*_write_steps(operations, numbers), f"\\boxed{{{problem.answer}}}"]


def label_steps(problem: Problem, steps: Sequence[str]) -> list[bool]:
    """Return for each step True if the attempt is right up to it: each step is an operation of the problem, in an order
    in which its numbers are known, and the boxed one has the answer and comes last.
    """
    operations = TEMPLATES[problem.data["template"]].operations
    expected = _write_steps(operations, problem.data["numbers"])
    written: set[str] = set()
    labels: list[bool] = []
    good = True
    for step in steps:
        if good:
            index = expected.index(step) if step in expected else None
            if index is None:
                good = len(written) == len(operations) and check(problem, boxed(step))
            else:
                needed = {
                    expected[earlier]
                    for earlier in range(index)
                    if operations[earlier].name in (operations[index].left, operations[index].right)
                }
                good = needed <= written and step not in written
                written.add(step)
        labels.append(good)
    return labels


def sample_calls(problem: Problem, rng: random.Random) -> list[Call]:
    """Return the calls of a solution with Python: one, or two that share their variables."""
    operations = TEMPLATES[problem.data["template"]].operations
    numbers: dict[str, int] = problem.data["numbers"]
    results = compute_results(operations, numbers)
    if rng.random() < SPLIT:
        cut = rng.randrange(1, len(operations))
        parts = [operations[:cut], operations[cut:]]
    else:
        parts = [operations]
    known: dict[str, str] = {slot: str(number) for slot, number in numbers.items()}
    calls: list[Call] = []
    for part in parts:
        # A second call reads variables of the first, which an expression alone would not leave behind.
        is_inline = len(parts) == 1 and rng.random() < INLINE
        lines = _write_inline(part, known) if is_inline else _write_lines(part, known)
        plan = ", then ".join(_VERBS[operation.kind] for operation in part)
        calls.append(Call(f"{plan.capitalize()}.", "\n".join(lines), str(results[part[-1].name])))
    return calls


def _write_steps(operations: Sequence[Operation], numbers: Mapping[str, int]) -> list[str]:
    values = dict(numbers) | compute_results(tuple(operations), numbers)
    steps = []
    for operation in operations:
        left, right = values[operation.left], values[operation.right]
        work = (
            f"{left} * {right} / 100" if operation.kind == "percent" else f"{left} {_SYMBOLS[operation.kind]} {right}"
        )
        steps.append(f"{work} = {values[operation.name]}")
    return steps


def _write_lines(operations: Sequence[Operation], known: Mapping[str, str]) -> list[str]:
    """Return a line for each operation and one that prints the last result."""
    lines = []
    for operation in operations:
        left, right = (known.get(operand, operand) for operand in (operation.left, operation.right))
        lines.append(f"{operation.name} = {_write_operation(operation, left, right)}")
    return [*lines, f"print({operations[-1].name})"]


def _write_inline(operations: Sequence[Operation], known: Mapping[str, str]) -> list[str]:
    """Return one line that prints the value of one expression."""
    expressions = dict(known)
    compound: set[str] = set()
    for operation in operations:
        left, right = (
            f"({expressions[operand]})" if operand in compound else expressions[operand]
            for operand in (operation.left, operation.right)
        )
        expressions[operation.name] = _write_operation(operation, left, right)
        compound.add(operation.name)
    return [f"print({expressions[operations[-1].name]})"]


def _write_operation(operation: Operation, left: str, right: str) -> str:
    if operation.kind == "percent":
        return f"{left} * {right} // 100"
    return f"{left} {'//' if operation.kind == 'divide' else _SYMBOLS[operation.kind]} {right}"
