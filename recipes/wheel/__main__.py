"""One turn of the wheel in one command, each part as a user has it.

    python -m recipes.wheel

A service with the bundled policy and verifier searches Countdown's training problems, with 16 solutions each, and
records what training needs. Its export has the rollouts. The policy is trained on its own tokens in the solutions that
the verifier believes: nothing else tells what is right. Then both are measured on held-out problems.

Each part is kept in ``work`` beside this page, and an interrupted command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

from api.roles.private_service import run_private_service
from engine.text.json_lines import read_json_lines
from reasoner.client import Client
from reasoner.evaluation.suites.countdown import LEVELS, generate_problem
from reasoner.evaluation.suites.registry import load_problems
from recipes.bundled import SHIPPED, model
from recipes.bundled.data import Batch, Example, bucketed
from recipes.bundled.measure import Attempt, Models, attempts
from recipes.bundled.optim import Optimizer
from recipes.wheel import WORK
from workers.config.settings import load_settings

SUITE = "countdown"
SEARCH = {"strategy": {"name": "best_of_n", "n": 16}, "record_logprobs": True, "priority": "batch"}
WAVE = 200
"""Jobs that wait at once."""
BELIEVED = 0.5
"""Least score of a solution that is trained on."""
BATCH_TOKENS = 2048
MUON_RATE, ADAM_RATE = 0.001, 0.0002
SEED = 17


def main() -> None:
    """Run all parts that have not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=800, help="training problems to search")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--heldout", type=int, default=300, help="problems to measure on")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--url", help="a running service; default: one of its own")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    rollouts, trained = options.work / "rollouts.jsonl", options.work / "policy.pt"
    if not rollouts.exists():
        collect(rollouts, options.problems, options.url)
    if not trained.exists():
        examples = read_examples(rollouts)
        print(f"{len(examples)} different solutions with a score of {BELIEVED} or more")
        torch.save(train(examples, options.epochs).state_dict(), trained)
    figures = measure(trained, options.heldout)
    (options.work / "results.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(write_table(figures))


def collect(target: Path, count: int, url: str | None) -> None:
    """Search training problems and write their rollouts."""
    console = Console(stderr=True)
    if url is not None:
        search(target, count, url)
        return
    with run_private_service(load_settings(), console) as own:
        search(target, count, own)


def search(target: Path, count: int, url: str) -> None:
    run = f"wheel-{time.time_ns()}"
    with Client(url) as client:
        for start in track(range(0, count, WAVE), "searching"):
            numbers = range(start, min(start + WAVE, count))
            texts = [generate_problem("train", f"wheel/{n}", LEVELS[n % len(LEVELS)]).text for n in numbers]
            jobs = [client.submit({"problem": text, "metadata": {"run": run}, **SEARCH}) for text in texts]
            for job in jobs:
                client.wait(job.id)
        new = target.with_suffix(".new")
        with new.open("w") as file:
            for line in client.export(format="rollouts", metadata=[f"run={run}"]):
                file.write(line + "\n")
        new.rename(target)


def read_examples(path: Path) -> list[Example]:
    """Return each believed solution once, with the tokens that the policy generated as targets."""
    examples: dict[tuple[int, ...], Example] = {}
    for _, line in read_json_lines(path):
        row: dict[str, Any] = json.loads(line)
        if row["finish_reason"] in ("answer", "stop") and (row["reward_score"] or 0.0) >= BELIEVED:
            ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
            trained = [start + at for at, flag in enumerate(row["response_mask"]) if flag]
            examples[tuple(ids)] = Example(ids[:-1], [(position - 1, ids[position]) for position in trained])
    return [*examples.values()]


def train(examples: Sequence[Example], epochs: int) -> model.Backbone:
    """Return the policy after this many passes over the examples."""
    policy, _ = model.load(SHIPPED / "policy")
    optimizer = Optimizer(policy.named_parameters(), muon_rate=MUON_RATE, adam_rate=ADAM_RATE)
    policy.train()
    batches = [batch for epoch in range(epochs) for batch in _shuffle(examples, epoch)]
    for number, batch in enumerate(track(batches, "training")):
        hidden = policy(batch.ids).flatten(0, 1)[batch.target_at]
        F.cross_entropy(hidden @ policy.embedding.T, batch.targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step(min(1.0, (number + 1) / 20) * (1 - number / len(batches)))
    return policy.eval()


def _shuffle(examples: Sequence[Example], epoch: int) -> Iterator[Batch]:
    rng = random.Random(f"{SEED}/{epoch}")
    return bucketed(rng.sample(examples, len(examples)), BATCH_TOKENS, rng)


def measure(trained: Path, count: int) -> dict[str, dict[str, float]]:
    """Return the accuracies of the policy before and after on held-out problems."""
    problems = load_problems(SUITE, limit=count, seed=SEED)
    prm, head = model.load(SHIPPED / "prm")
    assert head is not None
    figures = {}
    for name in ("before", "after"):
        policy, _ = model.load(SHIPPED / "policy")
        if name == "after":
            policy.load_state_dict(torch.load(trained, weights_only=True))
        models = Models(policy, prm, head)
        greedy = attempts(models, problems, 1, 0.0, SEED)
        samples = attempts(models, problems, 16, 1.0, SEED)
        figures[name] = {
            "greedy": _mean(group[0].right for group in greedy),
            "one sample": _mean(attempt.right for group in samples for attempt in group),
            "best of 16": _mean(max(group, key=_read_score).right for group in samples),
            "pass@16": _mean(any(attempt.right for attempt in group) for group in samples),
        }
    return figures


def _read_score(attempt: Attempt) -> float:
    return attempt.last


def _mean(values: Iterator[bool]) -> float:
    flags = [*values]
    return sum(flags) / len(flags)


def write_table(figures: dict[str, dict[str, float]]) -> str:
    """Return the accuracies as a table in Markdown, and the gain over the best of 16."""
    rows = [f"| {name} | {figures['before'][name]:.3f} | {figures['after'][name]:.3f} |" for name in figures["before"]]
    gain = 100 * (figures["after"]["greedy"] - figures["before"]["best of 16"])
    head = ["| | before | after |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", f"Greedy after is {gain:+.1f} points from best of 16 before."])


if __name__ == "__main__":
    main()
