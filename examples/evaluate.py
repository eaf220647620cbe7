"""Accuracy against tokens: run some strategies on the same held-out problems and compare.

``reasoner eval`` does this with seeds, confidence intervals, charts and resuming; this is the loop behind it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import reasoner
from engine.core.local_engine import LocalEngine
from reasoner.admission.resolve import resolve_program_job
from reasoner.evaluation.suites.registry import check_answer, load_problems
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job

BUNDLED = Path(reasoner.__file__).parent / "bundled"
STRATEGIES = [{"name": "greedy"}, {"name": "best_of_n", "n": 8}, {"name": "best_first", "n": 8}]
NUM_PROBLEMS = 8


async def main() -> None:
    engine = LocalEngine({"policy": BUNDLED / "policy", "prm": BUNDLED / "prm"})
    problems = load_problems("countdown", limit=NUM_PROBLEMS)
    print(f"{'strategy':12} {'solved':>7} {'tokens':>7}")
    for strategy in STRATEGIES:
        solved = tokens = 0
        for problem in problems:
            fields = {"problem": problem.text, "model": "policy", "strategy": strategy, "seed": 1}
            request = JobRequest.model_validate(fields | {"verifier": {"kind": "prm", "model": "prm"}})
            outcome = await run_job(resolve_program_job(request), engine, MemoryJournal())
            solved += check_answer(problem, outcome.result.answer)
            tokens += outcome.usage.total
        print(f"{strategy['name']:12} {solved:>4}/{len(problems)} {tokens:>7}")
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
