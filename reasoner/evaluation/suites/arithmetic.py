"""Word problems with large numbers: two to four operations that nobody does in the head, and a computer does at once.

A problem is a template (``templates``) with numbers: quantities of four to nine digits, and factors, divisors and
percentages where the text needs smaller ones. Quotients and percentages come out whole.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from reasoner.evaluation.suites.problem import Problem, Split, hash_problem, split_of
from reasoner.evaluation.suites.templates import NAMES, TEMPLATES, Operation, Template

LEVELS: tuple[str, ...] = ("o2", "o3", "o4")
"""Names of the levels: ``oK`` has K operations."""

TEMPERATURE = 0.7
"""Sampling temperature of searches: a wrong digit spoils a number, and there are many digits."""

LIMIT = 10**15
"""Bound of every result, so that a solution stays short."""
SMALLEST_QUANTITY = 1000
LONGEST_ANSWER = 30


def generate_problem(split: Split, seed: int | str, level: str) -> Problem:
    """Generate a problem of this split and level, deterministically from the arguments."""
    rng = random.Random(f"arithmetic/{split}/{level}/{seed}")
    templates = [template for template in TEMPLATES.values() if len(template.operations) == int(level[1:])]
    while True:
        template = rng.choice(templates)
        numbers = sample_numbers(template, rng)
        if numbers is None or split_of(canonical(template.name, numbers)) != split:
            continue
        results = compute_results(template.operations, numbers)
        key = canonical(template.name, numbers)
        return Problem(
            id=f"arithmetic-{level}-{hash_problem(key):016x}",
            suite="arithmetic",
            level=level,
            text=_write_question(template, numbers, rng),
            answer=str(results[template.operations[-1].name]),
            data={"template": template.name, "numbers": numbers},
        )


def canonical(template: str, numbers: Mapping[str, int]) -> str:
    return f"arithmetic:{template};" + ",".join(f"{slot}={numbers[slot]}" for slot in sorted(numbers))


def sample_numbers(template: Template, rng: random.Random) -> dict[str, int] | None:
    """Sample the numbers of a template; ``None`` if a result is not positive, too large or not a whole number."""
    numbers = {name: slot.sample(rng) for name, slot in template.slots.items()}
    if template.adjusted is not None:
        slot, sign = template.adjusted
        division = next(operation for operation in template.operations if operation.kind == "divide")
        before = template.operations[: template.operations.index(division)]
        values = numbers | compute_results(before, numbers)
        numbers[slot] += sign * (values[division.left] % values[division.right])
        if not template.slots[slot].accepts(numbers[slot]):
            return None
    if len(set(numbers.values())) < len(numbers):
        return None
    values = dict(numbers)
    for operation in template.operations:
        left, right = values[operation.left], values[operation.right]
        is_inexact = (operation.kind == "divide" and left % right) or (
            operation.kind == "percent" and left * right % 100
        )
        if is_inexact:
            return None
        values[operation.name] = operation.apply(left, right)
        if not 0 < values[operation.name] < LIMIT:
            return None
    return numbers


def compute_results(operations: tuple[Operation, ...], numbers: Mapping[str, int]) -> dict[str, int]:
    """Return the result of each operation by its name."""
    values = dict(numbers)
    for operation in operations:
        values[operation.name] = operation.apply(values[operation.left], values[operation.right])
    return {operation.name: values[operation.name] for operation in operations}


def _write_question(template: Template, numbers: Mapping[str, int], rng: random.Random) -> str:
    first, second = rng.sample(NAMES, 2)
    words: dict[str, str | int] = {"name": first, "friend": second, "things": rng.choice(template.things)}
    return rng.choice(template.texts).format(**words, **numbers)


def check(problem: Problem, answer: str | None) -> bool:
    """Return True if the answer is the right number."""
    if answer is None:
        return False
    text = answer.strip()
    return text.isascii() and text.isdigit() and len(text) <= LONGEST_ANSWER and int(text) == int(problem.answer)
