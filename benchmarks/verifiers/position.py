"""Position bias of a model that compares: its verdicts on pairs of a right and a wrong solution, in both orders."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from engine.core.local_engine import LocalEngine
from engine.text.json_lines import read_json_lines
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job

BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"


async def measure_position(cases: Path) -> dict[str, float]:
    """Return shares over the problems of a file of cases with a right and a wrong solution.

    ``bias``: the mean probability of the solution that is shown first, minus one half; ``first_order`` and
    ``second_order``: the share of right verdicts where the right solution is shown first, or second; ``both_orders``:
    that of their mean, which is what a tournament uses.
    """
    engine = LocalEngine({"policy": BUNDLED / "policy", "checker": BUNDLED / "checker"})
    verdicts = []
    try:
        for problem, (right, wrong) in pair_solutions(cases).items():
            verdicts.append(await _compare(engine, problem, right, wrong))
    finally:
        await engine.close()
    pairs = [(shown_first, 1.0 - other_first) for shown_first, other_first in verdicts]
    count = len(pairs)
    return {
        "pairs": count,
        "bias": sum(first + 1.0 - second for first, second in pairs) / count / 2 - 0.5,
        "first_order": sum(first > 0.5 for first, _ in pairs) / count,
        "second_order": sum(second > 0.5 for _, second in pairs) / count,
        "both_orders": sum(first + second > 1.0 for first, second in pairs) / count,
    }


def pair_solutions(cases: Path) -> dict[str, tuple[str, str]]:
    """Return by problem a solution with the right answer and one without."""
    found: dict[str, dict[bool, str]] = defaultdict(dict)
    for _, line in read_json_lines(cases):
        case: dict[str, Any] = json.loads(line)
        found[case["problem"]][case["final_answer_correct"]] = "\n\n".join(case["steps"])
    return {problem: (both[True], both[False]) for problem, both in found.items() if len(both) == 2}


async def _compare(engine: LocalEngine, problem: str, right: str, wrong: str) -> tuple[float, float]:
    """Return the probability of the right solution where it is shown first, and of the wrong one shown first."""
    journal = MemoryJournal()
    fields = {"problem": problem, "candidates": [right, wrong], "model": "policy", "seed": 1}
    strategy = {"name": "select", "by": "tournament"}
    verifier = {"kind": "pairwise", "model": "checker"}
    request = JobRequest.model_validate({**fields, "strategy": strategy, "verifier": verifier})
    await run_job(resolve_program_job(request), engine, journal)
    [entry] = [entry for entry in journal.entries if entry.type == "compare"]
    in_order, reverse = entry.data["verdicts"]
    if entry.data["nodes"] == ["1", "0"]:
        in_order, reverse = reverse, in_order
    return in_order["score"], reverse["score"]
