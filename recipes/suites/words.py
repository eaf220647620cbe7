"""Solutions of word problems, with exact labels of their steps."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.words import Term, check, signed
from recipes.suites.steps import boxed

_STEP = re.compile(r"(\d{1,4}) ([+\-*]) (\d{1,4}) = (\d{1,4})")


@dataclass(slots=True)
class PartialSolution:
    """State of an unfinished solution: the running total and the terms that are left."""

    total: int | None
    unused: list[int]
    """Signed values that can be added next."""
    products: list[Term]
    """Products not yet multiplied."""
    used: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Problem) -> PartialSolution:
        terms = [tuple(term) for term in problem.data["terms"]]
        return cls(None, [signed(term) for term in terms if len(term) == 2], [t for t in terms if len(t) == 3])

    def options(self) -> list[tuple[int, str, int]]:
        """Return every useful next step (a, op, b); empty if only the answer is left to state."""
        found = [(term[1], "*", term[2]) for term in self.products]
        for first in [self.total] if self.total is not None else self.unused:
            for other in self.unused:
                if first > 0 and first + other > 0 and (self.total is not None or other != first):
                    found.append((first, "+" if other > 0 else "-", abs(other)))
        return found

    def take(self, a: int, op: str, b: int, result: int) -> None:
        """Apply an allowed step with its ``result`` as written, so that a wrong sum stays in the total."""
        if op == "*":
            term = next(term for term in self.products if {term[1], term[2]} == {a, b})
            self.products.remove(term)
            self.unused.append(term[0] * result)
            return
        if self.total is None:
            self.unused.remove(a)
            self.used.append(a)
        elif op == "+" and a != self.total:
            a, b = b, a
        other = b if op == "+" else -b
        self.unused.remove(other)
        self.used.append(other)
        self.total = result

    def allows(self, a: int, op: str, b: int) -> bool:
        options = self.options()
        return (a, op, b) in options or (op != "-" and (b, op, a) in options)


def arithmetic(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def sample_solution(problem: Problem, rng: random.Random) -> list[str]:
    """Return the steps of a solution in random order."""
    ledger = PartialSolution.of(problem)
    steps: list[str] = []
    while options := ledger.options():
        a, op, b = rng.choice(options)
        result = arithmetic(a, op, b)
        ledger.take(a, op, b, result)
        steps.append(f"{a} {op} {b} = {result}")
    return [*steps, f"\\boxed{{{ledger.total}}}"]


def label_steps(problem: Problem, steps: Sequence[str]) -> list[bool]:
    """Return for each step True if the attempt is still right after it.

    A step is good if it uses available quantities with the right operation and its arithmetic is right; the boxed step
    is good if no term is left and it states the total. After the first bad step all steps are bad.
    """
    ledger = PartialSolution.of(problem)
    labels: list[bool] = []
    good = True
    for step in steps:
        if good:
            match = _STEP.fullmatch(step)
            if match is not None:
                a, op, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
                good = ledger.allows(a, op, b) and arithmetic(a, op, b) == result
                if good:
                    ledger.take(a, op, b, result)
            else:
                good = not ledger.unused and not ledger.products and check(problem, boxed(step))
        labels.append(good)
    return labels
