"""Thoughts of a policy that thinks: traces of a depth-first search for a Countdown solution, with its wrong turns.

A line of a thought is a move with the numbers left, all results of the last two numbers, or a return to earlier
numbers. The traces take good and bad moves; the targets of training are the exact probabilities of the choices of an
expert, who takes a move that keeps the target in reach, if there is one that was not tried, and goes back otherwise.
So the model learns from the contexts of a search that fails often to act like one that does not (DAgger: Ross et al.
2011, https://arxiv.org/abs/1011.0686; searches as text: Gandhi et al. 2024, https://arxiv.org/abs/2404.03683).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from reasoner.evaluation.suites.countdown import Move, after, generate_problem, good_moves, moves
from reasoner.evaluation.suites.problem import Problem
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import Example
from recipes.suites import countdown

LEVELS = (("n3", 0.1), ("n4", 0.45), ("n5", 0.45))
"""Share of each level among the examples."""
OPEN, CLOSE = "<think>\n", "\n</think>\n\n"
LONGEST = 1400
"""Maximum number of tokens of a thought; a trace that grows longer is finished by the expert."""
CUT, NO_THOUGHT, DIRECT = 0.25, 0.08, 0.15
"""Share of the examples whose thought is closed at a random place, of those without a thought, and of those whose
answer is requested at once."""
REQUEST = "Final answer: \\boxed{"
"""The request of strategies that probe a thought for its answer."""
KEEN = (0.0, 0.1, 0.1, 0.25, 0.5)
"""Probabilities, by trace, with which it takes the expert's move."""
CHILDREN = {3: 4, 4: 5, 5: 1000}
"""Maximum number of moves that a trace tries from so many numbers, before it goes back."""
LEAVE = (0.4, 0.9)
"""Probability of going back from numbers that cannot reach the target, before and after the first move there."""

Options = dict[Move, float]


@dataclass(slots=True)
class Node:
    """Numbers of a search in progress and the moves that were tried from them."""

    numbers: list[int]
    tried: set[Move] = field(default_factory=set)

    def untried(self) -> list[Move]:
        return [move for move in moves(self.numbers) if move not in self.tried]

    def untried_good(self, target: int) -> list[Move]:
        return [move for move in good_moves(self.numbers, target) if move not in self.tried]


class Trace:
    """Token ids of one thought with the expert's choices; ``write`` begins it, ``search`` does the rest."""

    def __init__(self, tokenizer: Tokenizer, problem: Problem, rng: random.Random) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self.target: int = problem.data["target"]
        self.stack = [Node(list(problem.data["numbers"]))]
        self.path: list[Move] = []
        self.ids: list[int] = []
        self.choices: list[tuple[int, int, float]] = []
        """(index of a token, token, probability)."""
        self.keen = rng.choice(KEEN)
        self.patience = int(60 * (LONGEST / 60) ** rng.random())
        """Tokens after which every move is the expert's, so that the lengths of traces vary evenly on a log scale."""

    def search(self) -> None:
        """Write the thought of a search that ends when it has found a solution."""
        while True:
            node = self.stack[-1]
            if len(node.numbers) == 2:
                if self.write_results(node.numbers):
                    return
                self.go_back()
                continue
            if len(self.stack) == 1 and not node.untried_good(self.target):
                node.tried.clear()  # every way was left too early: it starts over
            good, untried = node.untried_good(self.target), node.untried()
            leave = self.leaving(node, good, untried)
            hurried = len(self.ids) > self.patience
            start = len(self.ids)
            if self.goes_back(node, good, leave, hurried):
                self.go_back()
            else:
                keen = good and (hurried or self.rng.random() < self.keen)
                self.take(node, self.rng.choice(good if keen else untried))
            self.note_choice(start, good, untried, leave)

    def leaving(self, node: Node, good: list[Move], untried: list[Move]) -> float:
        """Return the probability with which the expert goes back from here instead of moving."""
        if good or len(self.stack) == 1:
            return 0.0
        return LEAVE[bool(node.tried)] if untried else 1.0

    def goes_back(self, node: Node, good: list[Move], leave: float, hurried: bool) -> bool:
        if len(self.stack) == 1:
            return False
        if hurried:
            return not good
        return len(node.tried) >= CHILDREN[len(node.numbers)] or self.rng.random() < leave

    def take(self, node: Node, move: Move) -> None:
        node.tried.add(move)
        self.path.append(move)
        self.stack.append(Node(after(node.numbers, move[0], move[2], move[3])))
        self.write("{} {} {} = {}, left ".format(*move) + " ".join(map(str, self.stack[-1].numbers)) + "\n")

    def go_back(self) -> None:
        """Return to the deepest numbers from which the expert sees a way, or only to the ones before."""
        depth = len(self.stack) - 2
        if len(self.ids) > self.patience or self.rng.random() < 0.75:
            while depth and not self.stack[depth].untried_good(self.target):
                depth -= 1
        del self.stack[depth + 1 :], self.path[depth:]
        numbers = " ".join(map(str, self.stack[-1].numbers))
        self.write(f"Wait, back to {numbers}\n" if depth else f"Alternatively, from {numbers}\n")

    def write_results(self, numbers: Sequence[int]) -> bool:
        """Write the results of two numbers up to the one that is the target; return True if there is one."""
        results = []
        for move in moves(numbers):
            results.append("{} {} {} = {}".format(*move))
            if move[3] == self.target:
                self.path.append(move)
                self.write(", ".join(results) + f"\nTherefore {self.target} works.")
                return True
        self.write(", ".join(results) + "\n")
        return False

    def write(self, text: str) -> None:
        self.ids.extend(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def note_first(self, start: int, good: list[Move], untried: list[Move], leave: float) -> None:
        """Note the probabilities of the expert's first tokens."""
        moves_ = good or untried
        options: Options = {move: (1 - leave) / len(moves_) for move in moves_} if moves_ else {}
        shares: dict[int, float] = {}
        for move, share in options.items():
            token = tok.token_id(self.tokenizer, str(move[0]))
            shares[token] = shares.get(token, 0.0) + share
        if leave:
            wait = self.ids[start] if self.ids[start] in self.words() else self.words()[0]
            shares[wait] = shares.get(wait, 0.0) + leave
        self.choices.extend((start, token, share) for token, share in shares.items())

    def note_choice(self, start: int, good: list[Move], untried: list[Move], leave: float) -> None:
        """Note the probabilities of the expert's first tokens, and of the rest of the move that was written."""
        self.note_first(start, good, untried, leave)
        if self.ids[start] not in self.words():
            self.choices.extend(self.later_choices(start, self.path[-1], good, untried))

    def later_choices(
        self, start: int, written: Move, good: list[Move], untried: list[Move]
    ) -> list[tuple[int, int, float]]:
        """Return the choices of the operation and the second number, given what was written before them."""
        found: list[tuple[int, int, float]] = []
        everything = [*untried, written]
        for place in (1, 2):
            matching = [move for move in good if move[:place] == written[:place]]
            matching = matching or [move for move in everything if move[:place] == written[:place]]
            counts: dict[str, int] = {}
            for move in matching:
                counts[str(move[place])] = counts.get(str(move[place]), 0) + 1
            for piece, count in counts.items():
                token = tok.token_id(self.tokenizer, f" {piece} " if place == 1 else piece)
                found.append((start + place, token, count / len(matching)))
        return found

    def words(self) -> tuple[int, int]:
        return tok.token_id(self.tokenizer, "Wait"), tok.token_id(self.tokenizer, "Alternatively")


def sample_problem(rng: random.Random, seed: str) -> Problem:
    """Sample a Countdown problem of the training split."""
    level = rng.choices([name for name, _ in LEVELS], [share for _, share in LEVELS])[0]
    return generate_problem("train", seed, level)


def thinking_example(tokenizer: Tokenizer, seed: int, index: int) -> Example:
    """Return a problem, the thought of a search, and the solution that it found.

    Some thoughts end at a random place, as a cap on thinking ends them, and some examples have none; the solution is
    then any right one, so that the model gives its best guess.
    """
    rng = random.Random(f"thinking/{seed}/{index}")
    problem = sample_problem(rng, f"thinking/{seed}/{index}")
    trace = Trace(tokenizer, problem, rng)
    kind = rng.random()
    if kind < NO_THOUGHT:
        return join(tokenizer, problem, [], [], None, rng)
    trace.search()
    end = rng.randrange(1, len(trace.ids) - 4) if kind < NO_THOUGHT + CUT else len(trace.ids)
    choices = [choice for choice in trace.choices if choice[0] < end]
    path = trace.path if end == len(trace.ids) else None
    return join(tokenizer, problem, trace.ids[:end], choices, path, rng)


def join(
    tokenizer: Tokenizer,
    problem: Problem,
    thought: list[int],
    choices: list[tuple[int, int, float]],
    path: list[Move] | None,
    rng: random.Random,
) -> Example:
    """Return the example of a thought and its solution; without a path, of a guess with an expert's probabilities.

    The end of a thought that found nothing is no target: a model would learn to end its thoughts anywhere.
    """
    prompt = tok.encode_prompt(tokenizer, problem.text)
    opening = tokenizer.encode(OPEN if thought else "<think>", add_special_tokens=False).ids
    closing = tokenizer.encode(CLOSE if thought else "\n" + CLOSE, add_special_tokens=False).ids
    written = [f"{a} {op} {b} = {result}," for a, op, b, result in path] if path else ()
    steps = countdown.walk(problem, rng, stray=0.0, given=written)
    is_direct = bool(thought) and rng.random() < DIRECT
    if is_direct:
        closing += tokenizer.encode(REQUEST, add_special_tokens=False).ids
        steps = [steps[-1].removeprefix("\\boxed{")]
    answer = [*tokenizer.encode(tok.SEPARATOR.join(steps), add_special_tokens=False).ids, tok.END]
    ids = [*prompt, *opening, *thought, *closing, *answer]
    first = len(prompt) - 1 if thought else len(prompt) + len(opening) + len(closing) - 1
    before_answer = len(ids) - len(answer) - 1
    forced = range(before_answer - len(closing), before_answer) if path is None or is_direct else ()
    targets = [i for i in range(first, len(ids) - 1) if i not in forced]
    example = Example(ids[:-1], [(i, ids[i + 1]) for i in targets])
    begin = len(prompt) + len(opening) - 1 - first
    example.choices = [(begin + index, token, share) for index, token, share in choices]
    if path is None and not is_direct:
        example.choices.extend(guesses(tokenizer, problem, steps, targets.index(before_answer), answer))
    return example


def guesses(
    tokenizer: Tokenizer, problem: Problem, steps: Sequence[str], begin: int, answer: list[int]
) -> list[tuple[int, int, float]]:
    """Return the probabilities of all right choices at each step of a solution that no thought has found."""
    found: list[tuple[int, int, float]] = []
    numbers: list[int] = problem.data["numbers"]
    separator = tok.token_id(tokenizer, tok.SEPARATOR)
    start = 0
    for step in steps[:-1]:
        options = good_moves(numbers, problem.data["target"])
        pieces = step.split(" ")
        for place in range(3):
            matching = [move for move in options if [str(part) for part in move[:place]] == pieces[:place]]
            for piece in dict.fromkeys(str(move[place]) for move in matching):
                share = sum(str(move[place]) == piece for move in matching) / len(matching)
                found.append(
                    (begin + start + place, tok.token_id(tokenizer, f" {piece} " if place == 1 else piece), share)
                )
        numbers = countdown.apply(numbers, step) or []
        start = answer.index(separator, start) + 1
    return found
