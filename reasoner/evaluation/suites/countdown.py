"""Countdown: reach a target from a few numbers, each used exactly once, with + - * /.

A state is the sorted tuple of the numbers left. ``reachable(state)`` is a bit mask of every value that uses them all,
memoised over all problems, so that checking if the target is reachable is exact and costs microseconds. Intermediate
results are positive whole numbers up to ``LIMIT``.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

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

_STEP = re.compile(r"(\d{1,4}) ([+\-*/]) (\d{1,4}) = (\d{1,4}), left (\d{1,4}(?: \d{1,4})*)")
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_MASKS: dict[State, int] = {}
_ODDS: dict[State, dict[int, float]] = {}
LARGEST_REMEMBERED = 4
"""Maximum number of numbers in a state whose odds are memoised; larger states rarely recur."""


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
            return make_problem(numbers, target, template=rng.choice(TEMPLATES), rng=rng)


def make_problem(numbers: Sequence[int], target: int, *, template: str = TEMPLATES[0], rng: random.Random) -> Problem:
    """Return the problem with these numbers and this target, which must be reachable."""
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    key = canonical(numbers, target)
    result = Problem(
        id=f"countdown-n{len(numbers)}-{hash_problem(key):016x}",
        suite="countdown",
        level=f"n{len(numbers)}",
        text=template.format(numbers=listed, target=target),
        answer="",
        data={"numbers": list(numbers), "target": target},
    )
    answer = boxed(solution(result, rng)[-1])
    assert answer is not None
    return Problem(result.id, result.suite, result.level, result.text, answer, result.data)


def canonical(numbers: Sequence[int], target: int) -> str:
    return f"countdown:{','.join(map(str, sorted(numbers)))}={target}"


# Solving


def moves(numbers: Sequence[int]) -> Iterator[tuple[int, str, int, int]]:
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


def reachable(state: State) -> int:
    """Return a bit mask in which bit v is set if v can be made from all numbers of the sorted state."""
    if len(state) == 1:
        return 1 << state[0]
    known = _MASKS.get(state)
    if known is None:
        known = 0
        for a, _, b, result in moves(state):
            known |= reachable(tuple(sorted(after(state, a, b, result))))
        _MASKS[state] = known
    return known


def odds(numbers: Sequence[int], target: int) -> float:
    """Return the probability that uniformly random legal moves end at the target."""
    return _odds(tuple(sorted(numbers))).get(target, 0.0)


def _odds(state: State) -> dict[int, float]:
    if len(state) == 1:
        return {state[0]: 1.0}
    known = _ODDS.get(state)
    if known is None:
        known = {}
        choices = [tuple(sorted(after(state, a, b, result))) for a, _, b, result in moves(state)]
        for choice in choices:
            for value, chance in _odds(choice).items():
                known[value] = known.get(value, 0.0) + chance / len(choices)
        if len(state) <= LARGEST_REMEMBERED:
            _ODDS[state] = known
    return known


def can_reach(numbers: Sequence[int], target: int) -> bool:
    return bool(reachable(tuple(sorted(numbers))) >> target & 1)


def open_share(numbers: Sequence[int], target: int) -> float:
    """Return the fraction of legal moves after which the target is still reachable."""
    return len(good_moves(numbers, target)) / sum(1 for _ in moves(numbers))


def good_moves(numbers: Sequence[int], target: int) -> list[tuple[int, str, int, int]]:
    """Return the moves (a, op, b, result) after which the target is still reachable."""
    return [move for move in moves(numbers) if can_reach(after(numbers, move[0], move[2], move[3]), target)]


def solution(problem: Problem, rng: random.Random) -> list[str]:
    """Return the steps of a solution, sampled uniformly from the moves that keep the target reachable."""
    return walk(problem, rng, stray=0.0)


def walk(problem: Problem, rng: random.Random, *, stray: float, given: Sequence[str] = ()) -> list[str]:
    """Return the steps of an attempt that takes any legal move with probability ``stray`` at each step.

    It starts with the given steps, which must be legal.
    """
    numbers: list[int] = problem.data["numbers"]
    target: int = problem.data["target"]
    expressions = [(number, str(number)) for number in numbers]
    steps: list[str] = []
    while len(numbers) > 1:
        options = list(moves(numbers))
        if len(steps) < len(given):
            options = [move for move in options if given[len(steps)].startswith("{} {} {} = {},".format(*move))]
        elif rng.random() >= stray:
            options = good_moves(numbers, target) or options
        a, op, b, result = rng.choice(options)
        numbers = after(numbers, a, b, result)
        steps.append(f"{a} {op} {b} = {result}, left {' '.join(map(str, numbers))}")
        parts: list[str] = []
        for value in (a, b):
            used = next(entry for entry in expressions if entry[0] == value)
            expressions.remove(used)
            parts.append(used[1] if used[1].isdigit() else f"({used[1]})")
        expressions.append((result, f"{parts[0]} {op} {parts[1]}"))
    return [*steps, f"\\boxed{{{expressions[0][1]}}}"]


# Checking


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


def label_steps(problem: Problem, steps: Sequence[str]) -> list[bool]:
    """Return for each step True if the attempt is still right after it.

    A step is good if it is legal, its arithmetic and its list of numbers left are right, and the target is still
    reachable; the boxed step is good if the answer passes ``check``. After the first bad step all steps are bad.
    """
    numbers: list[int] = problem.data["numbers"]
    labels: list[bool] = []
    good = True
    for step in steps:
        left = apply(numbers, step)
        if left is not None:
            good = good and can_reach(left, problem.data["target"])
            numbers = left
        else:
            good = good and len(numbers) == 1 and check(problem, boxed(step))
        labels.append(good)
    return labels


def apply(numbers: Sequence[int], step: str) -> list[int] | None:
    """Return the numbers left after a legal and correct step, as written; ``None`` for any other text."""
    match = _STEP.fullmatch(step)
    if match is None:
        return None
    a, b, result = int(match[1]), int(match[3]), int(match[4])
    if (max(a, b), match[2], min(a, b), result) not in moves(numbers) or (a < b and match[2] in "-/"):
        return None
    left = [int(number) for number in match[5].split()]
    return left if sorted(left) == sorted(after(numbers, a, b, result)) else None


def boxed(step: str) -> str | None:
    """Return the content of a step that is one ``\\boxed{...}``, else ``None``."""
    match = _BOXED.fullmatch(step)
    return match[1] if match else None
