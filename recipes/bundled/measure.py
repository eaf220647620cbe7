"""Measure a policy and a PRM on held-out problems with the recipe's own sampler: the gate that a model must pass.

    python -m recipes.bundled.measure --suite countdown --problems 300

Prints, by level and together: greedy, single sample, majority, best-of-N, votes weighted by the PRM, beam search,
the ceiling pass@N, and the within-problem AUC of the PRM, which is the probability that a good step or solution of a
problem scores above a bad one of the same problem (pooled AUC would also reward knowing how hard a problem is).
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import check_answer, get_family, load_problems
from recipes.bundled import SHIPPED, WORK, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.generate import generate, score
from recipes.bundled.sample import steps_of
from recipes.suites.solutions import label_steps
from recipes.suites.steps import boxed

TOKENIZER = tok.load()
SEP = tok.token_id(TOKENIZER, tok.SEPARATOR)


@dataclass(slots=True)
class Attempt:
    """A finished or partial solution."""

    tokens: list[int]
    steps: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    answer: str | None = None
    right: bool = False

    @property
    def last(self) -> float:
        return self.scores[-1] if self.scores else 0.0

    @property
    def least(self) -> float:
        return min(self.scores, default=0.0)


@dataclass(frozen=True, slots=True)
class Models:
    policy: model.Backbone
    prm: model.Backbone
    head: tuple[Tensor, Tensor]


def attempts(
    models: Models, problems: Sequence[Problem], each: int, temperature: float, seed: int
) -> list[list[Attempt]]:
    """Return scored samples of every problem."""
    prompts = [tok.encode_prompt(TOKENIZER, problem.text) for problem in problems]
    generator = torch.Generator().manual_seed(seed)
    repeated = [prompt for prompt in prompts for _ in range(each)]
    outputs = generate(models.policy, repeated, temperature=temperature, stop=(tok.END,), random=generator)
    found = [Attempt(tokens) for tokens in outputs]
    judge(models, [(problem, a) for i, problem in enumerate(problems) for a in found[i * each : (i + 1) * each]])
    return [found[i * each : (i + 1) * each] for i in range(len(problems))]


def judge(models: Models, pairs: Sequence[tuple[Problem, Attempt]]) -> None:
    """Fill in steps, scores and the answer of each attempt; equal attempts are scored once."""
    distinct: dict[tuple[str, tuple[int, ...]], list[Attempt]] = defaultdict(list)
    texts: dict[str, list[int]] = {}
    for problem, attempt in pairs:
        body = [token for token in attempt.tokens if token != tok.END]
        attempt.steps = steps_of(TOKENIZER, body)
        attempt.answer = boxed(attempt.steps[-1]) if attempt.steps else None
        attempt.right = check_answer(problem, attempt.answer)
        if problem.text not in texts:
            texts[problem.text] = tok.encode_prompt(TOKENIZER, problem.text)
        distinct[problem.text, tuple(body)].append(attempt)
    sequences: list[list[int]] = []
    separators: list[list[int]] = []
    for text, body_ids in distinct:
        ids = [*texts[text], *body_ids]
        if ids[-1] != SEP:
            ids.append(SEP)
        sequences.append(ids)
        separators.append([i for i, token in enumerate(ids) if token == SEP])
    for group, scores in zip(distinct.values(), score(models.prm, models.head, sequences, separators), strict=True):
        for attempt in group:
            attempt.scores = scores


def beam(
    models: Models, problems: Sequence[Problem], width: int, temperature: float, seed: int, rounds: int = 12
) -> tuple[list[list[Attempt]], list[int]]:
    """PRM-guided beam search: ``width`` candidates a step, the best sqrt(width) distinct ones go on.

    Returns the final candidates of each problem and the tokens spent on it: generated ones, and those of each
    distinct step that the verifier computed, the prompt not counted.
    """
    keep = round(width**0.5)
    generator = torch.Generator().manual_seed(seed)
    prompts = [tok.encode_prompt(TOKENIZER, problem.text) for problem in problems]
    beams: list[list[Attempt]] = [[Attempt([])] for _ in problems]
    done: list[list[Attempt]] = [[] for _ in problems]
    spent = [0] * len(problems)
    for _ in range(rounds):
        jobs = [(p, a) for p, live in enumerate(beams) for a in live for _ in range(width // len(live))]
        if not jobs:
            break
        prefixes = [prompts[p] + a.tokens for p, a in jobs]
        outputs = generate(models.policy, prefixes, temperature=temperature, stop=(tok.END, SEP), random=generator)
        fresh: list[dict[tuple[int, ...], Attempt]] = [{} for _ in problems]
        for (p, parent), tokens in zip(jobs, outputs, strict=True):
            spent[p] += len(tokens)
            whole = tuple(parent.tokens + tokens)
            if whole not in fresh[p]:
                spent[p] += len(tokens)
                fresh[p][whole] = Attempt(list(whole))
        judge(models, [(problems[p], a) for p, group in enumerate(fresh) for a in group.values()])
        for p, group in enumerate(fresh):
            ranked = sorted(group.values(), key=lambda a: -a.last)
            ended = [a for a in ranked if a.tokens[-1] != SEP]
            done[p].extend(ended)
            beams[p] = [a for a in ranked if a.tokens[-1] == SEP][:keep] if not ended else []
    return done, spent


def auc(pairs: Sequence[tuple[float, bool]]) -> tuple[float, int]:
    """Return the number of wins of good over bad scores (a tie is half a win) and of comparisons."""
    good = np.array([s for s, label in pairs if label])
    bad = np.array([s for s, label in pairs if not label])
    if not len(good) or not len(bad):
        return 0.0, 0
    wins = (good[:, None] > bad).sum() + 0.5 * (good[:, None] == bad).sum()
    return float(wins), len(good) * len(bad)


def within(problems: Sequence[Problem], samples: Sequence[Sequence[Attempt]]) -> dict[str, float]:
    """Return the within-problem AUC of the last score, and of each step among attempts still good before it."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for problem, group in zip(problems, samples, strict=True):
        by: dict[str, list[tuple[float, bool]]] = defaultdict(list)
        for attempt in group:
            by["answer"].append((attempt.last, attempt.right))
            for i, label in enumerate(label_steps(problem, attempt.steps)):
                if i < len(attempt.scores):
                    by[f"step {i + 1}"].append((attempt.scores[i], label))
                if not label:
                    break
        for name, pairs in by.items():
            wins, count = auc(pairs)
            if count:
                totals[name][0] += wins / count
                totals[name][1] += 1
    return {name: wins / count for name, (wins, count) in sorted(totals.items()) if count >= 5}


def vote(group: Sequence[Attempt], weight: Callable[[Attempt], float]) -> bool:
    """Return True if the answer with the largest total weight is right; the first wins a tie."""
    totals: dict[str, float] = {}
    right: dict[str, bool] = {}
    for attempt in group:
        if attempt.answer is not None:
            totals[attempt.answer] = totals.get(attempt.answer, 0.0) + weight(attempt)
            right[attempt.answer] = attempt.right
    return right[max(totals, key=lambda answer: totals[answer])] if totals else False


def passes(rights: Sequence[bool], n: int) -> float:
    """Return the unbiased estimate of pass@n from all samples (Chen et al. 2021)."""
    total, good = len(rights), sum(rights)
    if total - good < n:
        return 1.0
    return 1.0 - float(np.prod(1.0 - n / np.arange(total - good + 1, total + 1)))


def measure(
    models: Models,
    suite: str,
    count: int,
    *,
    each: int = 64,
    temperature: float | None = None,
    seed: int = 7,
    widths: Sequence[int] = (4, 16),
) -> dict[str, Any]:
    temperature = get_family(suite).TEMPERATURE if temperature is None else temperature
    problems = load_problems(suite, limit=count, seed=seed)
    greedy = attempts(models, problems, 1, 0.0, seed)
    samples = attempts(models, problems, each, temperature, seed)
    rows: dict[str, list[float]] = {"greedy": [float(group[0].right) for group in greedy]}
    rows["single"] = [float(np.mean([a.right for a in group])) for group in samples]
    for n in (4, 16, 64):
        if n > each:
            continue
        rows[f"majority@{n}"] = [float(vote(group[:n], lambda _: 1.0)) for group in samples]
        rows[f"best_of_n@{n}"] = [float(max(group[:n], key=lambda a: a.last).right) for group in samples]
        rows[f"weighted_last@{n}"] = [float(vote(group[:n], lambda a: a.last)) for group in samples]
        rows[f"weighted_min@{n}"] = [float(vote(group[:n], lambda a: a.least)) for group in samples]
    for n in (n for n in (4, 8, 16, 32, 64) if n <= each):
        rows[f"pass@{n}"] = [passes([a.right for a in group], n) for group in samples]
    mean = [float(np.mean([len(a.tokens) for a in group])) for group in samples]
    rows["tokens of a sample"] = mean
    for width in widths:
        final, spent = beam(models, problems, width, temperature, seed + width)
        rows[f"beam@{width}"] = [float(max(g, key=lambda a: a.last).right) if g else 0.0 for g in final]
        rows[f"beam@{width}+rule"] = [float(any(a.right for a in g)) for g in final]
        rows[f"beam@{width} tokens"] = [float(s) for s in spent]
        rows[f"rule at tokens of beam@{width}"] = [
            passes([a.right for a in group], max(1, min(each, round(s / m))))
            for group, s, m in zip(samples, spent, mean, strict=True)
        ]
    levels = sorted({problem.level for problem in problems})
    table = {name: {"all": float(np.mean(values))} for name, values in rows.items()}
    for level in levels:
        chosen = [i for i, problem in enumerate(problems) if problem.level == level]
        for name, values in rows.items():
            table[name][level] = float(np.mean([values[i] for i in chosen]))
    return {
        "suite": suite,
        "problems": count,
        "temperature": temperature,
        "rows": table,
        "auc": within(problems, samples),
    }


def show(result: dict[str, Any]) -> None:
    levels = list(next(iter(result["rows"].values())))
    print(f"{result['suite']}, {result['problems']} problems, T = {result['temperature']}")
    print(f"{'':34}" + "".join(f"{level:>9}" for level in levels))
    for name, values in result["rows"].items():
        print(f"{name:34}" + "".join(f"{values[level]:9.3f}" for level in levels))
    print("within-problem AUC: " + ", ".join(f"{name} {value:.3f}" for name, value in result["auc"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("countdown", "words"), default="countdown")
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--each", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="of the samples; the default is the suite's own")
    parser.add_argument("--policy", default="policy")
    parser.add_argument("--seed", type=int, default=7, help="which held-out problems; 0 is kept for the final tables")
    parser.add_argument("--shipped", type=Path, default=SHIPPED)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prm, head = model.load(options.shipped / "prm")
    if head is None:
        raise SystemExit("reasoner/bundled/prm holds no score head")
    models = Models(model.load(options.shipped / options.policy)[0], prm, head)
    result = measure(
        models, options.suite, options.problems, each=options.each, temperature=options.temperature, seed=options.seed
    )
    show(result)
    WORK.mkdir(exist_ok=True)
    (WORK / f"measure-{options.policy}-{options.suite}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
