"""The thinking policy's own thoughts with the choices of the expert: what it should have written where it went wrong.

    python -m recipes.bundled.relabel --problems 4000      samples thoughts at training problems

A thought is followed line by line. Its moves are the context; the targets are the expert's (``thoughts``), which knows
the moves that were tried and those that keep the target in reach. A line with an error is the last one: its target is
the right token at the error. Shards of 500 thoughts go to ``work/thoughts``; a shard that exists is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from engine.text.json_lines import read_json_lines
from reasoner.evaluation.suites.countdown import Move, after, moves
from reasoner.evaluation.suites.problem import Problem
from recipes.bundled import SHIPPED, WORK, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import Example
from recipes.bundled.generate import generate
from recipes.bundled.thoughts import CLOSE, OPEN, Node, Trace, join, sample_problem

SEED = 11
SHARD = 500
FOLDER = WORK / "thoughts"
_MOVE = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+), left [\d ]+\n")
_LONGEST = 1200


class Relabelled(Trace):
    """A thought that the policy wrote, followed until it ends or goes wrong."""

    def __init__(self, tokenizer: Tokenizer, problem: Problem, rng: random.Random) -> None:
        super().__init__(tokenizer, problem, rng)
        self.targets: list[tuple[int, int]] = []
        """(index of a token in ``ids``, the token that belongs there); the others are context alone."""
        self.has_found = False
        self._must_go_back = False

    def follow(self, ids: list[int]) -> None:
        """Read the tokens of a thought."""
        newline = self.tokenizer.token_to_id("Ċ")
        line: list[int] = []
        for token in ids:
            line.append(token)
            if token == newline:
                if not self._follow_line(line):
                    return
                line = []

    def _follow_line(self, line: list[int]) -> bool:
        """Read a line; return False if it is the last one that is of use."""
        node, start = self.stack[-1], len(self.ids)
        if self._must_go_back:
            return self._return(line)
        if len(node.numbers) == 2:
            text, found = self._results(node.numbers)
            self._must_go_back = True
            self.has_found = found
            return self._expect(line, text) and not found
        if len(self.stack) == 1 and not node.untried_good(self.target):
            node.tried.clear()
        good, untried = node.untried_good(self.target), node.untried()
        leave = self.leaving(node, good, untried)
        text = self.tokenizer.decode(line, skip_special_tokens=False)
        match = _MOVE.fullmatch(text)
        move: Move | None = None
        if match is not None:
            results = {legal[:3]: legal for legal in moves(node.numbers)}
            move = results.get((int(match[1]), match[2], int(match[3])))  # a wrong result has the right one as target
        if move is None:
            is_return = line[0] in self.words()
            self.ids.extend(line)
            self.path.append((0, "", 0, 0))
            self.note_first(start, good, untried, leave)
            self.path.pop()
            del self.ids[start:]
            return self._return(line, skip=1) if is_return else False
        left = after(node.numbers, move[0], move[2], move[3])
        expected = "{} {} {} = {}, left ".format(*move) + " ".join(map(str, left)) + "\n"
        is_right = self._expect(line, expected, skip=3)
        node.tried.add(move)
        self.path.append(move)
        self.note_choice(start, good, untried, leave)
        self.stack.append(Node(left))
        return is_right

    def _return(self, line: list[int], skip: int = 0) -> bool:
        """Read a return to earlier numbers: the target is the expert's, the search goes on where the text went."""
        self._must_go_back = False
        depth = len(self.stack) - 2
        while depth > 0 and not self.stack[depth].untried_good(self.target):
            depth -= 1
        goes_on = self._expect(line, self._return_text(depth), skip=skip)
        if not goes_on:  # another return, to numbers that there are, is a context like any other
            own = self.tokenizer.decode(line, skip_special_tokens=False)
            depth = next((d for d in range(len(self.stack)) if self._return_text(d) == own), -1)
        if depth < 0 or len(self.stack) < 2:
            return False
        if not goes_on:
            self.ids.extend(line[len(self.ids) - self._line_start :])
        del self.stack[depth + 1 :], self.path[depth:]
        return True

    def _return_text(self, depth: int) -> str:
        numbers = " ".join(map(str, self.stack[depth].numbers))
        return f"Wait, back to {numbers}\n" if depth else f"Alternatively, from {numbers}\n"

    def _results(self, numbers: list[int]) -> tuple[str, bool]:
        results = []
        for move in moves(numbers):
            results.append("{} {} {} = {}".format(*move))
            if move[3] == self.target:
                self.path.append(move)
                return ", ".join(results) + "\n", True
        return ", ".join(results) + "\n", False

    def _expect(self, line: list[int], text: str, skip: int = 0) -> bool:
        """Add the tokens of a line up to the first that differs from a text, which is the target there."""
        self._line_start = len(self.ids)
        right = self.tokenizer.encode(text, add_special_tokens=False).ids
        for index, token in enumerate(right):
            if index >= skip:
                self.targets.append((len(self.ids), token))
            if index >= len(line) or line[index] != token:
                return False
            self.ids.append(token)
        return len(line) == len(right)


def own_example(tokenizer: Tokenizer, index: int, ids: list[int]) -> Example | None:
    """Return the example of a sampled thought; ``None`` if nothing of it is of use."""
    rng = random.Random(f"own/{SEED}/{index}")
    problem = sampled_problem(index)
    trace = Relabelled(tokenizer, problem, rng)
    trace.follow(ids)
    if not trace.ids:
        return None
    if trace.has_found and trace.ids[-1] == tokenizer.token_to_id("Ċ"):
        start = len(trace.ids)
        trace.write(f"Therefore {trace.target} works.")
        trace.targets.extend((index, trace.ids[index]) for index in range(start, len(trace.ids)))
        whole = join(tokenizer, problem, trace.ids, [], trace.path, rng)
    else:
        whole = join(tokenizer, problem, trace.ids, [], None, rng)
    begin = len(tok.encode_prompt(tokenizer, problem.text)) + len(tokenizer.encode(OPEN, add_special_tokens=False).ids)
    return merge(whole, trace, begin)


class OwnThoughts:
    """Examples sampled from the thoughts on disk, including shards that arrive during training; none without any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.thoughts: list[tuple[int, list[int]]] = []
        self.read: set[str] = set()

    def refresh(self) -> None:
        for path in sorted(FOLDER.glob("*.jsonl")):
            if path.name not in self.read:
                self.read.add(path.name)
                for _, line in read_json_lines(path):
                    record = json.loads(line)
                    self.thoughts.append((record["index"], record["ids"]))

    def example(self, rng: random.Random) -> Example | None:
        return own_example(self.tokenizer, *rng.choice(self.thoughts)) if self.thoughts else None


def merge(whole: Example, trace: Relabelled, begin: int) -> Example:
    """Return the example with the targets of a followed thought instead of its own tokens."""
    end = begin + len(trace.ids)
    answer = [entry for entry in whole.targets if entry[0] + 1 >= end]
    shift = len(whole.targets) - len(answer)
    chosen = {index: begin + index - 1 for index, _, _ in trace.choices}
    hard = {begin + index - 1: token for index, token in trace.targets}
    positions = sorted({*chosen.values(), *hard})
    example = Example(whole.ids)
    example.targets = [
        (position, hard.get(position, whole.ids[min(position + 1, len(whole.ids) - 1)])) for position in positions
    ]
    rows = {position: row for row, position in enumerate(positions)}
    example.choices = [(rows[begin + index - 1], token, share) for index, token, share in trace.choices]
    offset = len(example.targets) - shift
    example.targets += answer
    example.choices += [(index + offset, token, share) for index, token, share in whole.choices]
    return example


def sampled_problem(index: int) -> Problem:
    return sample_problem(random.Random(f"own/{SEED}/{index}"), f"own/{SEED}/{index}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = tok.build_thinking()
    policy, _ = model.load(SHIPPED / "policy-thinking")
    FOLDER.mkdir(parents=True, exist_ok=True)
    opening = tokenizer.encode(OPEN, add_special_tokens=False).ids
    close = tokenizer.encode(CLOSE, add_special_tokens=False).ids[1]
    for shard in track(range(options.problems // SHARD), "sampling", console=Console(stderr=True)):
        path = FOLDER / f"{shard:05d}.jsonl"
        if path.exists():
            continue
        indices = range(shard * SHARD, (shard + 1) * SHARD)
        prompts = [[*tok.encode_prompt(tokenizer, sampled_problem(index).text), *opening] for index in indices]
        generator = torch.Generator().manual_seed(SEED * 100_000 + shard)
        outputs = generate(policy, prompts, temperature=1.0, stop=(close,), limit=_LONGEST, random=generator)
        lines = [json.dumps({"index": i, "ids": ids}) for i, ids in zip(indices, outputs, strict=True)]
        new = path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        os.replace(new, path)


if __name__ == "__main__":
    main()
