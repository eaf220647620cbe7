"""Measure the policy that calls Python on held-out problems, with the recipe's own sampler and the service's
runner of calls.

    python -m recipes.bundled.measure_python --problems 300

Prints, by level and together, the share of right answers with Python and without it, and how solutions fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from reasoner.deadline import unlimited
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import check_answer, load_problems
from reasoner.jobs.tool_specs import PYTHON_INSTRUCTION
from reasoner.sandbox.cells import CellLimits
from reasoner.tools.fences import find_call, find_cells
from reasoner.tools.python import PythonRunner
from recipes.bundled import SHIPPED, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.generate import generate
from recipes.bundled.policy_python import KIND

SEED = 11
ROUNDS = 4
"""Maximum number of calls of a solution; the text behind the last one ends it."""
FENCE = "```"

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(slots=True)
class Attempt:
    """A solution in progress."""

    problem: Problem
    prompt: list[int]
    written: list[int] = field(default_factory=list)
    """Token ids behind the prompt, the injected ones included."""
    num_calls: int = 0
    num_errors: int = 0
    """Number of calls that did not end by themselves."""
    is_finished: bool = False

    def find_answer(self, tokenizer: Tokenizer) -> str | None:
        found = _BOXED.findall(tokenizer.decode(self.written))
        return found[-1] if found and self.is_finished else None


class Solver:
    """A policy that writes solutions in turn with the sandbox."""

    def __init__(self, backbone: model.Backbone, tokenizer: Tokenizer, temperature: float = 0.0) -> None:
        self._model, self.tokenizer, self._temperature = backbone, tokenizer, temperature
        self._fence = self._encode(FENCE)[0]
        self._python = PythonRunner(CellLimits(), unlimited)
        self._random = torch.Generator().manual_seed(SEED)

    async def solve(self, problems: Sequence[Problem], *, has_python: bool) -> list[Attempt]:
        """Return a solution of each problem; with Python, calls are run and their outputs injected."""
        system = PYTHON_INSTRUCTION if has_python else None
        attempts = [Attempt(problem, tok.encode_prompt(self.tokenizer, problem.text, system)) for problem in problems]
        for _ in range(ROUNDS):
            active = [attempt for attempt in attempts if not attempt.is_finished]
            prompts = [attempt.prompt + attempt.written for attempt in active]
            stop = (tok.END, self._fence)
            outputs = generate(
                self._model, prompts, temperature=self._temperature, stop=stop, limit=160, random=self._random
            )
            for attempt, tokens in zip(active, outputs, strict=True):
                attempt.written.extend(tokens)
                attempt.is_finished = not tokens or tokens[-1] != self._fence
                if not attempt.is_finished:
                    await self._run_call(attempt)
        return attempts

    async def _run_call(self, attempt: Attempt) -> None:
        """Run the call with which the text ends. A text that ends with none is finished."""
        text = self.tokenizer.decode(attempt.written)
        result = await self._python.run(find_cells(text)) if find_call(text) is not None else None
        if result is None:
            attempt.is_finished = True
            return
        attempt.num_calls += 1
        attempt.num_errors += result.ended != "ok"
        attempt.written.extend(self._encode(result.format(text)))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def measure(backbone: model.Backbone, tokenizer: Tokenizer, count: int, temperature: float = 0.0) -> dict[str, float]:
    """Return shares of right answers by way and level, of cells with errors, and the mean number of tokens."""
    problems = load_problems("arithmetic", limit=count, seed=SEED)
    found: dict[str, float] = {}
    for name, has_python in (("with Python", True), ("without", False)):
        attempts = asyncio.run(Solver(backbone, tokenizer, temperature).solve(problems, has_python=has_python))
        rights: dict[str, list[bool]] = defaultdict(list)
        for attempt in attempts:
            right = check_answer(attempt.problem, attempt.find_answer(tokenizer))
            rights[attempt.problem.level].append(right)
            rights["all"].append(right)
        for level in sorted(rights):
            found[f"{name}, {level}"] = sum(rights[level]) / len(rights[level])
        found[f"{name}, tokens"] = sum(len(attempt.written) for attempt in attempts) / len(attempts)
        if has_python:
            found["solutions without a call"] = sum(attempt.num_calls == 0 for attempt in attempts) / len(attempts)
            found["solutions with an error"] = sum(attempt.num_errors > 0 for attempt in attempts) / len(attempts)
    return found


def measure_shipped(count: int) -> dict[str, dict[str, float]]:
    """Return the measurements of the shipped model by the sampling of its solutions."""
    backbone, _ = model.load(SHIPPED / KIND)
    tokenizer = Tokenizer.from_file(str(SHIPPED / KIND / "tokenizer.json"))
    return {
        name: measure(backbone, tokenizer, count, temperature)
        for name, temperature in (("greedy", 0.0), ("one sample at T = 1", 1.0))
    }


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(measure_shipped(options.problems), indent=2))


if __name__ == "__main__":
    main()
