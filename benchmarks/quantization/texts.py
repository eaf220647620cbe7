"""Texts of the kind that the bundled model was made for: a problem and one of its solutions."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.text.tokenizer import Tokenizer
from reasoner.evaluation.suites.problem import Split
from reasoner.evaluation.suites.registry import SUITES, get_family


@dataclass(frozen=True, slots=True)
class Text:
    """A problem with a solution, in the chat template's marks."""

    tokens: tuple[int, ...]
    prompt: int
    """Tokens of the problem."""
    text: str


def texts(tokenizer: Tokenizer, split: Split, count: int) -> list[Text]:
    """So many, the suites and their levels in turn; the same ones each time. Solutions take random routes."""
    made = []
    for index in range(count):
        suite = get_family(SUITES[index % len(SUITES)])
        problem = suite.generate_problem(split, f"text/{index}", suite.LEVELS[index // len(SUITES) % len(suite.LEVELS)])
        steps = suite.solution(problem, random.Random(f"text/{index}"))
        prompt = tokenizer.encode_chat([{"role": "user", "content": problem.text}])
        end = () if tokenizer.eos is None else (tokenizer.eos,)
        tokens = prompt + tokenizer.encode("\n\n".join(steps)) + end
        made.append(Text(tokens, len(prompt), tokenizer.decode_all(tokens)))
    return made
