"""Sample the policy on training problems and keep the attempts, for the last phase of the PRM.

    python -m recipes.bundled.sample --problems 14000 --each 8

Half of the attempts at a problem are made at its suite's temperature, half at 1.
Shards of 1000 problems go to ``work/samples``; a shard that exists is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import defaultdict

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from engine.text.json_lines import read_json_lines
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import get_family
from recipes.bundled import SHIPPED, WORK, model
from recipes.bundled import tokenizer as tok
from recipes.bundled.data import BRANCHES, PRM_MIX, Example, draw, packed
from recipes.bundled.generate import generate
from recipes.suites.steps import boxed

SEED = 3
SHARD = 1000
FOLDER = WORK / "samples"


def steps_of(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return the steps of generated token ids, with or without the end token."""
    text: str = tokenizer.decode([token for token in tokens if token != tok.END], skip_special_tokens=False)
    return [step for step in text.split(tok.SEPARATOR) if step]


def sampled_problem(index: int) -> Problem:
    return draw(random.Random(f"sample/{SEED}/{index}"), f"sample/{SEED}/{index}", PRM_MIX)


class SampledAttempts:
    """Examples sampled from the attempts on disk, including shards that arrive during training."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.problems: list[tuple[int, list[list[str]]]] = []
        self.read: set[str] = set()
        self.refresh()
        if not self.problems:
            raise FileNotFoundError(f"no samples in {FOLDER}: run python -m recipes.bundled.sample first")

    def refresh(self) -> None:
        for path in sorted(FOLDER.glob("*.jsonl")):
            if path.name not in self.read:
                self.read.add(path.name)
                for _, line in read_json_lines(path):
                    record = json.loads(line)
                    self.problems.append((record["index"], record["attempts"]))

    def example(self, rng: random.Random) -> Example:
        """Return the attempts at one problem in random order."""
        index, attempts = rng.choice(self.problems)
        chosen = rng.sample(attempts, min(len(attempts), BRANCHES))
        return packed(self.tokenizer, sampled_problem(index), [], chosen, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=14000)
    parser.add_argument("--each", type=int, default=8, help="attempts at each problem")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = tok.load()
    policy, _ = model.load(SHIPPED / "policy")
    FOLDER.mkdir(parents=True, exist_ok=True)
    right = total = 0
    for shard in track(range(options.problems // SHARD), "sampling", console=Console(stderr=True)):
        path = FOLDER / f"{shard:05d}.jsonl"
        if path.exists():
            continue
        indices = range(shard * SHARD, (shard + 1) * SHARD)
        problems = [sampled_problem(index) for index in indices]
        prompts = [tok.encode_prompt(tokenizer, problem.text) for problem in problems]
        generator = torch.Generator().manual_seed(SEED * 100_000 + shard)
        jobs: dict[float, list[int]] = defaultdict(list)
        for row, problem in enumerate(problems):
            for attempt in range(options.each):
                jobs[get_family(problem.suite).TEMPERATURE if attempt % 2 else 1.0].append(row)
        outputs: dict[int, list[list[int]]] = defaultdict(list)
        for heat, rows in jobs.items():
            wanted = [prompts[row] for row in rows]
            made = generate(policy, wanted, temperature=heat, stop=(tok.END,), random=generator)
            for row, tokens in zip(rows, made, strict=True):
                outputs[row].append(tokens)
        lines: list[str] = []
        for row, (index, problem) in enumerate(zip(indices, problems, strict=True)):
            found = [steps_of(tokenizer, tokens) for tokens in outputs[row]]
            suite = get_family(problem.suite)
            right += sum(suite.check(problem, boxed(steps[-1])) for steps in found if steps)
            total += len(found)
            attempts = [list(steps) for steps in dict.fromkeys(map(tuple, found)) if steps]
            lines.append(json.dumps({"index": index, "attempts": attempts}))
        new = path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        os.replace(new, path)
    if total:
        print(f"{total} attempts, {right / total:.1%} right")


if __name__ == "__main__":
    main()
