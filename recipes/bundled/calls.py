"""Examples of the policy that calls Python: the same problems with and without it, as the system message says.

A solution with Python is a sentence, a block of code, and the block with what it printed, which the service writes:

    Multiply, then subtract.
    ```python
    made = 48213 * 219
    left = made - 312991
    print(left)
    ```
    ```output
    10245656
    ```

    \\boxed{10245656}
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from reasoner.evaluation.suites.arithmetic import LEVELS, generate_problem
from reasoner.evaluation.suites.problem import Problem
from reasoner.jobs.tool_specs import PYTHON_INSTRUCTION
from reasoner.tools.fences import format_output
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import Example
from recipes.suites.arithmetic import sample_calls, sample_solution

DIRECT = 0.25
"""Share of the examples without Python, whose digits are hard to learn and hardly help with the rest."""


@dataclass(frozen=True, slots=True)
class Part:
    """Text of a solution, written by the model or injected by the service."""

    text: str
    is_injected: bool = False


def write_parts(problem: Problem, rng: random.Random) -> list[Part]:
    """Return a random solution with Python; no target of training is in an injected part."""
    parts: list[Part] = []
    for call in sample_calls(problem, rng):
        separator = "\n" if parts else ""
        parts.append(Part(f"{separator}{call.plan}\n```python\n{call.code}\n```\n"))
        parts.append(Part(format_output(parts[-1].text, call.output), is_injected=True))
    return [*parts, Part(f"\n\\boxed{{{problem.answer}}}")]


def sample_problem(seed: int, index: int) -> tuple[Problem, random.Random]:
    """Return a training problem and the random numbers that choose its solution."""
    rng = random.Random(f"python/{seed}/{index}")
    return generate_problem("train", f"python/{seed}/{index}", rng.choice(LEVELS)), rng


def python_example(tokenizer: Tokenizer, seed: int, index: int) -> Example:
    """Return a problem with a solution; its targets are the tokens that the model writes."""
    problem, rng = sample_problem(seed, index)
    if rng.random() < DIRECT:
        system, parts = None, [Part(tok.SEPARATOR.join(sample_solution(problem, rng)))]
    else:
        system, parts = PYTHON_INSTRUCTION, write_parts(problem, rng)
    ids = tok.encode_prompt(tokenizer, problem.text, system)
    targets: list[tuple[int, int]] = []
    for part in parts:
        added = tokenizer.encode(part.text, add_special_tokens=False).ids
        if not part.is_injected:
            targets.extend((len(ids) - 1 + index, token) for index, token in enumerate(added))
        ids.extend(added)
    targets.append((len(ids) - 1, tok.END))
    return Example(ids, targets)
