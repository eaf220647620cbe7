"""Tokens that verification computes: an activated adapter on the policy's keys, a PRM, prompts to the same model.

python -m benchmarks.verifiers.adapter --adapter FOLDER --out benchmarks/results/adapters

FOLDER is an adapter that ``reasoner prm train --alora`` wrote for the bundled policy. The second table has the time of
steps with and without adapters on one thread, measured side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from api.studies.known_answers import LabelledProblems
from benchmarks.verifiers.adapter_steps import measure_steps
from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from reasoner.admission.resolve import resolve_program_job
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.run import run_job

BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"
VERIFIERS: Mapping[str, dict[str, object]] = {
    "activated adapter": {"kind": "graded", "model": "judge"},
    "PRM": {"kind": "prm", "model": "prm"},
    "prompts to the same model": {"kind": "judge"},
}
STRATEGIES: Mapping[str, dict[str, object]] = {
    "best_of_n, n = 16": {"name": "best_of_n", "n": 16},
    "beam, n = 16": {"name": "beam", "n": 16, "expansions": 4},
}


def main() -> None:
    """Write ``results.json`` and ``table.md``, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", type=Path, required=True, help="a trained adapter of the bundled policy")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = asyncio.run(_measure_searches(options.adapter, options.problems))
        steps = measure_steps(Path(name))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps({"searches": rows, "steps": steps}, indent=2) + "\n")
    text = _write_tables(rows, steps)
    (options.out / "table.md").write_text(text)
    print(text)


async def _measure_searches(adapter: Path, count: int) -> list[dict[str, Any]]:
    models = {name: BUNDLED / name for name in ("policy", "prm")}
    engine = LocalEngine(models, EngineOptions(kv_tokens=65_536), adapters={"judge": adapter})
    rows = []
    try:
        for strategy, parameters in STRATEGIES.items():
            for name, verifier in VERIFIERS.items():
                await engine.clear_cache()
                found = await _search(engine, parameters, verifier, count)
                rows.append({"strategy": strategy, "verifier": name, **found})
    finally:
        await engine.close()
    return rows


async def _search(
    engine: LocalEngine, strategy: dict[str, object], verifier: dict[str, object], count: int
) -> dict[str, Any]:
    """Return the share of right answers and the mean tokens of a job, over new problems of Countdown."""
    problems, right = LabelledProblems.open("countdown", count, seed=7), 0
    totals = dict.fromkeys(("generated", "computed", "cached", "verdicts"), 0)
    async with problems:
        for index, problem in enumerate(problems.problems()):
            journal = MemoryJournal()
            fields = {"problem": problem.question, "model": "policy", "seed": index, "budget": {"tokens": 20_000}}
            request = JobRequest.model_validate({**fields, "strategy": strategy, "verifier": verifier})
            outcome = await run_job(resolve_program_job(request), engine, journal)
            right += await problems.judge(problem, outcome.result.text or "", True)
            totals["generated"] += outcome.usage.generated
            totals["computed"] += outcome.usage.verifier_computed
            totals["cached"] += outcome.usage.verifier_cached
            totals["verdicts"] += sum(
                entry.type == "score" and entry.spend.verifier_computed > 0 for entry in journal.entries
            )
    return {"accuracy": right / count, "problems": count} | {name: value / count for name, value in totals.items()}


def _write_tables(rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    lines = [
        "| strategy | verifier | accuracy | generated | verdicts | computed for verification | a verdict | of its "
        "input cached | beside the PRM |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        prm = next(other for other in rows if (other["strategy"], other["verifier"]) == (row["strategy"], "PRM"))
        share = row["cached"] / (row["cached"] + row["computed"])
        lines.append(
            f"| {row['strategy']} | {row['verifier']} | {row['accuracy']:.2f} | {row['generated']:.0f} | "
            f"{row['verdicts']:.1f} | {row['computed']:.1f} | {row['computed'] / row['verdicts']:.1f} | {share:.1%} | "
            f"{row['computed'] / row['verdicts'] * prm['verdicts'] / prm['computed']:.3f} |"
        )
    lines += [
        "",
        "| model | branches | no adapters | loaded, not used | half of the branches | all, of four |",
    ]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for row in steps:
        others = [f"{row[name]:.2f} ms ({row[name] / row['none']:.2f})" for name in ("unused", "half", "all")]
        lines.append(f"| {row['model']} | {row['branches']} | {row['none']:.2f} ms | {' | '.join(others)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
