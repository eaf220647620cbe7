"""Train the generative verifier, which grows from the policy that thinks and knows its arithmetic, and export it.

    python -m recipes.bundled.checker             --export only exports the state that is there

Half of the solutions that it checks are samples of the policy (``recipes.bundled.sample``), half are synthetic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from prm.scorers.verdict_formats import NOTE as NOTE_KEY
from reasoner.evaluation.suites.countdown import generate_problem
from reasoner.evaluation.suites.problem import Problem
from recipes.bundled import SHIPPED, WORK, critiques, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.critiques import check_example, compare_example, is_right
from recipes.bundled.data import Batch, Example, countdown_attempt
from recipes.bundled.policy import numbers
from recipes.bundled.sample import SampledAttempts, sampled_problem
from recipes.bundled.train import Plan, export, parse_options, resume, train
from recipes.suites.countdown import sample_solution

SEED = 5
PLANS = {"checker": Plan(steps=8000, muon_rate=0.012, adam_rate=0.003)}
LEVELS = {"n3": 0.15, "n4": 0.4, "n5": 0.45}
"""Share of each level among the synthetic examples."""
KINDS = {"answer": 0.3, "beginning": 0.45, "pair": 0.25}
"""Shares of critiques of solutions with an answer, of unfinished ones, and of comparisons."""
NOTE = {
    "template": critiques.CHECK_PROMPT,
    "verdict": f"{critiques.VERDICT}: ",
    "labels": [label.removeprefix(": ") for label in critiques.LABELS],
    "stop": [critiques.VERDICT.strip()],
    "pairwise": {
        "template": critiques.COMPARE_PROMPT,
        "labels": [label.removeprefix(": ") for label in critiques.PAIR_LABELS],
    },
}
"""The formats that it was trained on, for its config.json (``prm.scorers.verdict_formats``)."""


class Solutions:
    """Right and wrong solutions of training problems, sampled from the policy or synthetic."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.sampled = SampledAttempts(tokenizer)

    def example(self, index: int) -> Example:
        """Return the example of an index."""
        rng = random.Random(f"checker/{SEED}/{index}")
        problem, attempts = self.sample(rng)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "pair":
            first = choose(problem, attempts, rng)
            second = choose(problem, [other for other in attempts if other != first] or attempts, rng)
            return compare_example(self.tokenizer, problem, first, second, rng)
        if kind == "beginning":
            attempts = [steps[: rng.randrange(1, len(steps))] for steps in attempts if len(steps) > 1] or attempts
        return check_example(self.tokenizer, problem, choose(problem, attempts, rng), rng)

    def sample(self, rng: random.Random) -> tuple[Problem, list[list[str]]]:
        """Return a problem and distinct attempts at it."""
        if rng.random() < 0.5:
            index, attempts = rng.choice(self.sampled.problems)
            problem = sampled_problem(index)
            if problem.suite == "countdown":
                return problem, attempts
        level = rng.choices(list(LEVELS), list(LEVELS.values()))[0]
        problem = generate_problem("train", f"checker/{SEED}/{rng.random()}", level)
        made = [sample_solution(problem, rng) for _ in range(2)]
        return problem, made + [countdown_attempt(problem, rng, []) for _ in range(4)]


def choose(problem: Problem, attempts: Sequence[list[str]], rng: random.Random) -> list[str]:
    """Return a right or a wrong attempt, each with probability one half if there are both."""
    wanted = rng.random() < 0.5
    return rng.choice([steps for steps in attempts if is_right(problem, steps) == wanted] or attempts)


def main() -> None:
    options, plan = parse_options(__doc__, "--kind", PLANS)
    tokenizer = tok.build_checker()
    backbone = model.Backbone(model.shape_of("checker", tokenizer.get_vocab_size()))
    model.initialise(backbone, numbers(tokenizer), SEED)
    model.grow(model.load(SHIPPED / "policy-thinking")[0], backbone)
    folder = WORK / "checker"

    def loss_of(batch: Batch) -> dict[str, Tensor]:
        hidden = backbone(batch.ids).flatten(0, 1)[batch.target_at]
        logs = F.log_softmax(hidden @ backbone.embedding.T, -1)
        return {"loss": -(logs[batch.share_of, batch.share_token] * batch.shares).sum() / len(batch.targets)}

    if options.export:
        resume(folder / "state.safetensors", backbone)
    else:
        solutions = Solutions(tokenizer)

        def examples(first: int, count: int, _: float) -> list[Example]:
            solutions.sampled.refresh()
            return [solutions.example(index) for index in range(first, first + count)]

        cost = train(folder, backbone, plan, examples, loss_of, seed=SEED, average=140)
        (folder / "cost.json").write_text(json.dumps(cost) + "\n")
    print(f"exported to {export('checker', backbone, notes={NOTE_KEY: NOTE})}")


if __name__ == "__main__":
    main()
