"""Texts of the kind that the bundled model was trained on: a problem and one of its solutions."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.text.tokenizer import Tokenizer
from reasoner.evaluation.suites.problem import Split
from reasoner.evaluation.suites.registry import POLICY_SUITES, get_family
from recipes.suites.solutions import sample_solution


@dataclass(frozen=True, slots=True)
class Text:
    """A problem with a solution, formatted by the chat template."""

    tokens: tuple[int, ...]
    prompt: int
    """Number of tokens of the problem."""
    text: str


def texts(tokenizer: Tokenizer, split: Split, count: int) -> list[Text]:
    """Return ``count`` texts, the same ones each time, with suites and levels in turn. Solutions take random routes."""
    made = []
    for index in range(count):
        suite = get_family(POLICY_SUITES[index % len(POLICY_SUITES)])
        level = suite.LEVELS[index // len(POLICY_SUITES) % len(suite.LEVELS)]
        problem = suite.generate_problem(split, f"text/{index}", level)
        steps = sample_solution(problem, random.Random(f"text/{index}"))
        prompt = tokenizer.encode_chat([{"role": "user", "content": problem.text}])
        end = () if tokenizer.eos is None else (tokenizer.eos,)
        tokens = prompt + tokenizer.encode("\n\n".join(steps)) + end
        made.append(Text(tokens, len(prompt), tokenizer.decode_all(tokens)))
    return made
