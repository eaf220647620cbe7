"""Countdown: reach a target from a few numbers, each used exactly once, with + - * /.

A state is the sorted tuple of the numbers left. ``reachable(state)`` is a bit mask of every value that uses them all,
memoised over all problems, so that checking if the target is reachable is exact and costs microseconds. Intermediate
results are positive whole numbers up to ``LIMIT``.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache

from reasoner.evaluation.suites.problem import Problem, Split, hash_problem, split_of

LEVELS: tuple[str, ...] = ("n3", "n4", "n5")
"""Names of the levels; ``nK`` has K numbers."""

TEMPERATURE = 1.0
"""Sampling temperature with the best results of searches, which need diverse first steps."""

LIMIT = 199
SMALLEST, LARGEST = 1, 12
TARGETS = range(10, 100)
EASIEST = 0.4
"""Maximum fraction of first moves that keep the target reachable; problems with a larger one are too easy."""

TEMPLATES = (
    "Use the numbers {numbers}, each exactly once, with + - * / to reach {target}.",
    "Combine {numbers} with + - * / to make {target}. Use each number exactly once.",
    "Reach {target} from {numbers}: use each number exactly once, with + - * /.",
    "Make {target} with + - * / from the numbers {numbers}, each used exactly once.",
)

State = tuple[int, ...]

Move = tuple[int, str, int, int]
"""Move (a, op, b, result)."""


def generate_problem(split: Split, seed: int | str, level: str) -> Problem:
    """Generate a solvable problem of this split and level, deterministically from the arguments."""
    rng = random.Random(f"countdown/{split}/{level}/{seed}")
    size = int(level[1:])
    while True:
        numbers = [rng.randint(SMALLEST, LARGEST) for _ in range(size)]
        target = rng.choice(TARGETS)
        if target in numbers or split_of(canonical(numbers, target)) != split:
            continue
        if can_reach(numbers, target) and open_share(numbers, target) <= EASIEST:
            return make_problem(numbers, target, template=rng.choice(TEMPLATES))


def make_problem(numbers: Sequence[int], target: int, *, template: str = TEMPLATES[0]) -> Problem:
    """Return the problem with these numbers and this target, which must be reachable."""
    return Problem(
        id=f"countdown-n{len(numbers)}-{hash_problem(canonical(numbers, target)):016x}",
        suite="countdown",
        level=f"n{len(numbers)}",
        text=template.format(numbers=", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}", target=target),
        answer=_solve(numbers, target),
        data={"numbers": list(numbers), "target": target},
    )


def canonical(numbers: Sequence[int], target: int) -> str:
    return f"countdown:{','.join(map(str, sorted(numbers)))}={target}"


def moves(numbers: Sequence[int]) -> Iterator[Move]:
    """Yield every legal move (a, op, b, result) once, with the larger number first."""
    seen: set[tuple[int, int]] = set()
    for i, x in enumerate(numbers):
        for y in numbers[i + 1 :]:
            a, b = (x, y) if x >= y else (y, x)
            if (a, b) in seen:
                continue
            seen.add((a, b))
            if a + b <= LIMIT:
                yield a, "+", b, a + b
            if a > b:
                yield a, "-", b, a - b
            if a * b <= LIMIT:
                yield a, "*", b, a * b
            if a % b == 0:
                yield a, "/", b, a // b


def after(numbers: Sequence[int], a: int, b: int, result: int) -> list[int]:
    """Return the numbers left after a move: the unused ones in order, then the result."""
    left = list(numbers)
    left.remove(a)
    left.remove(b)
    left.append(result)
    return left


@cache
def reachable(state: State) -> int:
    """Return a bit mask in which bit v is set if v can be made from all numbers of the sorted state."""
    if len(state) == 1:
        return 1 << state[0]
    mask = 0
    for a, _, b, result in moves(state):
        mask |= reachable(tuple(sorted(after(state, a, b, result))))
    return mask


def can_reach(numbers: Sequence[int], target: int) -> bool:
    return bool(reachable(tuple(sorted(numbers))) >> target & 1)


def open_share(numbers: Sequence[int], target: int) -> float:
    """Return the fraction of legal moves after which the target is still reachable."""
    return len(good_moves(numbers, target)) / sum(1 for _ in moves(numbers))


def good_moves(numbers: Sequence[int], target: int) -> list[Move]:
    """Return the moves (a, op, b, result) after which the target is still reachable."""
    return [move for move in moves(numbers) if can_reach(after(numbers, move[0], move[2], move[3]), target)]


def _solve(numbers: Sequence[int], target: int) -> str:
    expressions = [(number, str(number)) for number in numbers]
    while len(expressions) > 1:
        a, op, b, result = good_moves([number for number, _ in expressions], target)[0]
        left, right = (expressions.pop([number for number, _ in expressions].index(value))[1] for value in (a, b))
        expressions.append((result, f"({left} {op} {right})"))
    return expressions[0][1]


def check(problem: Problem, answer: str | None) -> bool:
    """Return True if the expression uses each given number exactly once and reaches the target."""
    if answer is None or len(answer) > 200:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
        used: list[int] = []
        value = _evaluate(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value == problem.data["target"] and sorted(used) == sorted(problem.data["numbers"])


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError("only whole numbers and + - * / are allowed")
