"""Cases in ProcessBench's format from held-out problems of the bundled suites, whose checkers label every step exactly.

    python -m recipes.prm.cases --suite countdown --out recipes/prm/work

writes ``countdown.jsonl`` to measure on and ``countdown-fit.jsonl``, of other problems, to fit a threshold on. The
solutions are a policy's own; of each problem there is at most one with an error and one without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from engine.core.local_engine import LocalEngine
from engine.protocol.types import Branch, Completion, GenerateRequest, SamplingParams, TokenizeRequest
from prm.scorers.steps import unify_line_ends
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import SUITES, check_answer, get_family, load_problems
from recipes.prm import SHIPPED, WORK
from recipes.suites.solutions import label_steps
from recipes.suites.steps import boxed

SAMPLES = 16
"""Number of sampled solutions of a problem, from which its cases are taken."""
AT_A_TIME = 16
"""Number of concurrent problems."""
SEPARATOR = "\n\n"


def write(suite: str, count: int, policy: Path, out: Path, seed: int) -> dict[Path, int]:
    """Write both files from ``count`` problems each; return the number of cases by file."""
    found = asyncio.run(_find(load_problems(suite, limit=2 * count), policy, seed))
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, part in ((suite, found[:count]), (f"{suite}-fit", found[count:])):
        lines = [json.dumps(case) + "\n" for group in part for case in group]
        (out / f"{name}.jsonl").write_text("".join(lines))
        written[out / f"{name}.jsonl"] = len(lines)
    return written


def cases(problem: Problem, texts: Sequence[str], generator: str) -> Iterator[dict[str, Any]]:
    """Yield the first solution with an error and the first without, in ProcessBench's format."""
    kinds: set[bool] = set()
    for number, text in enumerate(texts):
        steps = [step.strip() for step in unify_line_ends(text).split(SEPARATOR) if step.strip()]
        if not steps:
            continue
        labels = label_steps(problem, steps)
        if all(labels) not in kinds:
            kinds.add(all(labels))
            yield {
                "id": f"{problem.id}-{number}",
                "generator": generator,
                "problem": problem.text,
                "steps": steps,
                "final_answer_correct": check_answer(problem, boxed(steps[-1])),
                "label": -1 if all(labels) else labels.index(False),
            }


async def _find(problems: Sequence[Problem], policy: Path, seed: int) -> list[list[dict[str, Any]]]:
    """Return the cases of each problem."""
    engine = LocalEngine({"policy": policy})
    places = asyncio.Semaphore(AT_A_TIME)
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("solutions", total=len(problems))

            async def one(number: int, problem: Problem) -> list[dict[str, Any]]:
                async with places:
                    texts = await _solve(engine, problem, seed, number)
                progress.update(task, advance=1)
                return list(cases(problem, texts, policy.name))

            return await asyncio.gather(*(one(number, problem) for number, problem in enumerate(problems)))
    finally:
        await engine.close()


async def _solve(engine: LocalEngine, problem: Problem, seed: int, number: int) -> list[str]:
    """Return the texts of finished solutions in sample order."""
    prompt = await engine.tokenize(TokenizeRequest("policy", [{"role": "user", "content": problem.text}]))
    [info] = await engine.models()
    branches = tuple(Branch(seed, number * SAMPLES + each, info.context - len(prompt)) for each in range(SAMPLES))
    sampling = SamplingParams(temperature=get_family(problem.suite).TEMPERATURE)
    texts: dict[int, str] = {}
    async for event in engine.generate(GenerateRequest(f"case-{number}", "policy", prompt, branches, sampling)):
        if isinstance(event, Completion) and event.finish_reason == "stop":
            texts[event.index] = event.text
    return [texts[index] for index in sorted(texts)]


def main() -> None:
    """Write both case files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="countdown")
    parser.add_argument("--problems", type=int, default=300, help="in each of the two files")
    parser.add_argument("--policy", type=Path, default=SHIPPED / "policy", help="who writes the solutions")
    parser.add_argument("--out", type=Path, default=WORK)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    written = write(options.suite, options.problems, options.policy, options.out, options.seed)
    for path, count in written.items():
        print(f"{count} cases -> {path}")


if __name__ == "__main__":
    main()
