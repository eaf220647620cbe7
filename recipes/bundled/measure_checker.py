"""Measure the checker on the policy's samples of held-out problems, with the recipe's own sampler.

    python -m recipes.bundled.measure_checker --problems 300

Prints the share of right verdicts on solutions with an answer, on beginnings, and on pairs of a right and a wrong
solution in both orders, each with the critique and without (``direct``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import load_problems
from recipes.bundled import SHIPPED, critiques, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.generate import generate
from recipes.bundled.sample import steps_of

EACH = 8
"""Attempts at each problem."""
SEED = 11


class Checker:
    """The shipped checker: critiques sampled at temperature 1, and the probability of a label behind each."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(SHIPPED / "checker" / "tokenizer.json"))
        self._model, _ = model.load(SHIPPED / "checker")
        self._verdict = self.tokenizer.encode(critiques.VERDICT, add_special_tokens=False).ids

    @torch.inference_mode()
    def judge(self, prompts: Sequence[str], labels: tuple[str, str], *, direct: bool = False) -> list[float]:
        """Return for each prompt the probability of the first label, of both."""
        asked = [tok.encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        written = [list(self._verdict) for _ in asked]
        if not direct:
            random = torch.Generator().manual_seed(SEED)
            written = generate(self._model, asked, temperature=1.0, stop=self._verdict[-1:], limit=256, random=random)
        ids = [tok.token_id(self.tokenizer, label) for label in labels]
        shares = []
        for prompt, text in zip(asked, written, strict=True):
            hidden = self._model(torch.tensor([prompt + text]))[0, -1]
            shares.append(float((hidden @ self._model.embedding[ids].T).softmax(-1)[0]))
        return shares


def sample_attempts(count: int) -> list[tuple[Problem, list[list[str]]]]:
    """Return held-out problems with the policy's distinct attempts at each."""
    policy, _ = model.load(SHIPPED / "policy")
    tokenizer = tok.load()
    problems = load_problems("countdown", limit=count, seed=SEED)
    prompts = [tok.encode_prompt(tokenizer, problem.text) for problem in problems for _ in range(EACH)]
    random = torch.Generator().manual_seed(SEED)
    outputs = generate(policy, prompts, temperature=1.0, stop=(tok.END,), random=random)
    found = [tuple(steps_of(tokenizer, tokens)) for tokens in outputs]
    return [
        (problem, [list(steps) for steps in dict.fromkeys(found[i * EACH : (i + 1) * EACH]) if steps])
        for i, problem in enumerate(problems)
    ]


def measure(count: int) -> dict[str, float]:
    """Return the shares of right verdicts, and the numbers of cases."""
    checker, rng = Checker(), random.Random(SEED)
    answers, beginnings, pairs = list[tuple[str, bool]](), list[tuple[str, bool]](), list[tuple[str, bool]]()
    for problem, attempts in sample_attempts(count):
        for steps in attempts:
            if critiques.is_finished(steps):
                answers.append((critiques.check_prompt(problem, steps), critiques.is_right(problem, steps)))
            if len(steps) > 1:
                begun = steps[: rng.randrange(1, len(steps))]
                beginnings.append((critiques.check_prompt(problem, begun), critiques.is_right(problem, begun)))
        by_label = {critiques.is_right(problem, steps): steps for steps in attempts}
        if len(by_label) == 2:
            pairs.append((critiques.compare_prompt(problem, by_label[True], by_label[False]), True))
            pairs.append((critiques.compare_prompt(problem, by_label[False], by_label[True]), False))
    found: dict[str, float] = {}
    for name, cases, labels in (
        ("answers", answers, critiques.LABELS),
        ("beginnings", beginnings, critiques.LABELS),
        ("pairs", pairs, critiques.PAIR_LABELS),
    ):
        found[f"{name}, cases"] = len(cases)
        for direct in (False, True):
            shares = checker.judge([prompt for prompt, _ in cases], labels, direct=direct)
            right = sum((share > 0.5) == label for share, (_, label) in zip(shares, cases, strict=True))
            found[f"{name}, direct" if direct else name] = right / len(cases)
    return found


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(measure(options.problems), indent=2))


if __name__ == "__main__":
    main()
