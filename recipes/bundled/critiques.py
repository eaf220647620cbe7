"""Critiques of Countdown solutions: the arithmetic done again, and a verdict by the exact rule.

The critique of a solution with an answer evaluates the expression and compares the numbers used with those given. The
critique of an unfinished one does each step again and, if all are right, goes on to an end; so the votes on it are
rollouts. The critique of a pair evaluates both answers. Each ends in the label that the rule gives, also where the
rollout missed a target that is in reach: what a miss means is then learned with its exact frequency.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from tokenizers import Tokenizer

from reasoner.evaluation.suites.countdown import Move, after, check, good_moves, moves
from reasoner.evaluation.suites.problem import Problem
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import Example
from recipes.suites import countdown
from recipes.suites.steps import boxed

VERDICT = "\nVerdict"
LABELS = (": Yes", ": No")
PAIR_LABELS = (": A", ": B")
CHECK_PROMPT = "{{ question }}\n\n{{ solution }}\n\nCheck"
COMPARE_PROMPT = "{{ question }}\n\nFirst\n\n{{ first }}\n\nSecond\n\n{{ second }}\n\nCompare"
DIRECT = 0.12
"""Share of the examples whose verdict comes without a critique."""
STRAY = 0.25
"""Probability that a rollout takes any move instead of one that keeps the target in reach."""
WHOLE = range(len(tok.NUMBERS))

Weights = dict[str, float]


@dataclass(slots=True)
class Critique:
    """Token ids of a critique; ``choices`` has the exact shares of tokens where several are right."""

    tokenizer: Tokenizer
    ids: list[int] = field(default_factory=list)
    choices: list[tuple[int, int, float]] = field(default_factory=list)
    """(index of a token, token, probability)."""

    def write(self, text: str) -> None:
        self.ids += self.tokenizer.encode(text, add_special_tokens=False).ids

    def choose(self, move: Move, wanted: Sequence[Move], legal: Sequence[Move]) -> None:
        """Write a move's two numbers and operation, with the shares of the wanted moves at each place.

        Where the move is none of the wanted ones, the rest of it has the shares of all legal moves.
        """
        for place in range(3):
            options = wanted or legal
            shares = Counter(_piece(option, place) for option in options)
            for piece, count in shares.items():
                self.choices.append((len(self.ids), tok.token_id(self.tokenizer, piece), count / len(options)))
            self.write(_piece(move, place))
            wanted = [option for option in wanted if option[place] == move[place]]
            legal = [option for option in legal if option[place] == move[place]]

    def label(self, weights: Weights) -> None:
        """Write the verdict with one of its labels; the shares of all are the targets."""
        self.write(VERDICT)
        for piece, weight in weights.items():
            if weight:
                self.choices.append((len(self.ids), tok.token_id(self.tokenizer, piece), weight))
        self.ids.append(tok.token_id(self.tokenizer, max(weights, key=lambda piece: weights[piece])))

    def example(self, prompt: list[int]) -> Example:
        ids = prompt + self.ids
        targets = [(i, ids[i + 1]) for i in range(len(prompt) - 1, len(ids) - 1)]
        return Example(ids[:-1], targets, choices=self.choices)


def check_prompt(problem: Problem, steps: Sequence[str]) -> str:
    """Return the user's message that asks for the critique of a solution."""
    return tok.SEPARATOR.join([problem.text, *steps, "Check"])


def compare_prompt(problem: Problem, first: Sequence[str], second: Sequence[str]) -> str:
    """Return the user's message that asks which of two solutions is better."""
    return tok.SEPARATOR.join([problem.text, "First", *first, "Second", *second, "Compare"])


def check_example(tokenizer: Tokenizer, problem: Problem, steps: Sequence[str], rng: random.Random) -> Example:
    """Return the critique of a solution, or of its beginning, or its verdict alone."""
    critique = Critique(tokenizer)
    if rng.random() >= DIRECT:
        if is_finished(steps):
            evaluate(critique, problem, steps)
        else:
            follow(critique, problem, steps, rng)
    right = is_right(problem, steps)
    critique.label({LABELS[0]: float(right), LABELS[1]: float(not right)})
    return critique.example(tok.encode_prompt(tokenizer, check_prompt(problem, steps)))


def compare_example(
    tokenizer: Tokenizer, problem: Problem, first: Sequence[str], second: Sequence[str], rng: random.Random
) -> Example:
    """Return the comparison of two solutions, or its verdict alone. If both are right or wrong, neither is better."""
    critique = Critique(tokenizer)
    if rng.random() >= DIRECT:
        for name, steps in (("A\n", first), ("\nB\n", second)):
            critique.write(name)
            evaluate(critique, problem, steps)
    a, b = is_right(problem, first), is_right(problem, second)
    share = 0.5 if a == b else float(a)
    critique.label({PAIR_LABELS[0]: share, PAIR_LABELS[1]: 1 - share})
    return critique.example(tok.encode_prompt(tokenizer, compare_prompt(problem, first, second)))


def is_finished(steps: Sequence[str]) -> bool:
    return bool(steps) and boxed(steps[-1]) is not None


def is_right(problem: Problem, steps: Sequence[str]) -> bool:
    """Return True if the answer is right, or an unfinished solution can still become right."""
    if is_finished(steps):
        return check(problem, boxed(steps[-1]))
    return bool(steps) and countdown.label_steps(problem, steps)[-1]


def evaluate(critique: Critique, problem: Problem, steps: Sequence[str]) -> None:
    """Write the evaluation of the answer and, if it makes the target, the numbers used beside those given."""
    target = problem.data["target"]
    lines, value, used = reduce_expression(boxed(steps[-1]) if steps else None)
    if value is None:
        critique.write(", ".join([*lines, "breaks"]))
        return
    critique.write(", ".join([*(lines or [str(value)]), f"{'makes' if value == target else 'misses'} {target}"]))
    if value == target:
        given = sorted(problem.data["numbers"])
        critique.write(f", used {_join(sorted(used))} of {_join(given)}")


def reduce_expression(answer: str | None) -> tuple[list[str], int | None, list[int]]:
    """Return the calculations of an expression, its value, and its numbers.

    The value is ``None`` where a result is no whole number below 500, or the text is no expression.
    """
    lines: list[str] = []
    used: list[int] = []

    def reduce(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in WHOLE:
            used.append(node.value)
            return node.value
        if not isinstance(node, ast.BinOp):
            raise ValueError("no expression of whole numbers")
        a, b = reduce(node.left), reduce(node.right)
        op = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(node.op)]
        results = {"+": Fraction(a + b), "-": Fraction(a - b), "*": Fraction(a * b), "/": Fraction(a, b)}
        result = results[op]
        if result.denominator > 1 or int(result) not in WHOLE:
            raise ValueError("a result outside the tokenizer's numbers")
        lines.append(f"{a} {op} {b} = {int(result)}")
        return int(result)

    try:
        value = reduce(ast.parse((answer or "").strip(), mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return lines, None, used
    return lines, value, used


def follow(critique: Critique, problem: Problem, steps: Sequence[str], rng: random.Random) -> None:
    """Write each step again; if all are right, go on to an end, with an expert's moves and some at random."""
    target: int = problem.data["target"]
    numbers: list[int] = problem.data["numbers"]
    for index, step in enumerate(steps):
        redone, left = redo_step(numbers, step)
        critique.write(("\n" if index else "") + redone)
        if left is None:
            return
        numbers = left
    critique.write("\nThen\n" if steps else "Then\n")
    if len(numbers) == 1:
        critique.write(str(numbers[0]))
    while len(numbers) > 1:
        legal = list(moves(numbers))
        wanted = good_moves(numbers, target) or legal
        move = rng.choice(legal if rng.random() < STRAY else wanted)
        critique.choose(move, wanted, legal)
        numbers = after(numbers, move[0], move[2], move[3])
        critique.write(f" = {move[3]}" + (f", left {_join(numbers)}\n" if len(numbers) > 1 else ""))
    critique.write(f", {'makes' if numbers[0] == target else 'misses'} {target}")


def redo_step(numbers: Sequence[int], step: str) -> tuple[str, list[int] | None]:
    """Return a step with its true result and the numbers left after it; ``None`` for these if the step is wrong."""
    match = countdown.STEP.fullmatch(step)
    if match is None:
        return "breaks", None
    a, op, b, claimed = int(match[1]), match[2], int(match[3]), int(match[4])
    rest = Counter(numbers)
    for number in (a, b):
        if not rest[number]:
            return f"{number} missing", None
        rest[number] -= 1
    results = [move[3] for move in moves(numbers) if move[:3] == (max(a, b), op, min(a, b))]
    if not results or (a < b and op in "-/"):
        return f"{a} {op} {b}, breaks", None
    left = after(numbers, a, b, results[0])
    written = [int(number) for number in match[5].split()]
    is_right = results[0] == claimed and sorted(written) == sorted(left)
    redone = f"{a} {op} {b} = {results[0]}, left {_join(written if is_right else left)}"
    return (redone, written) if is_right else (f"{redone}, wrong", None)


def _piece(move: Move, place: int) -> str:
    return f" {move[1]} " if place == 1 else str(move[place])


def _join(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
