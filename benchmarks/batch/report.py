"""Report of the batch benchmark: accuracy both ways for each budget, and the difference on the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.batch.measure import STRATEGY, WAYS, Plan, Solved, Way
from reasoner.evaluation.statistics import Bootstrap, Estimate, clustered_wilson_interval

Values = npt.NDArray[np.float64]


def document(plan: Plan, found: Sequence[Solved], command: str) -> dict[str, Any]:
    """Return the document of results. Intervals are over problems, which keep their seeds together."""
    rows = []
    for tokens in plan.tokens:
        values = {way: _by_problem(found, way, tokens) for way in WAYS}
        gain = Estimate.from_means(Bootstrap(plan.problems).means(values["shared"] - values["even"]))
        for way in WAYS:
            chosen = _chosen(found, way, tokens)
            low, high = clustered_wilson_interval(values[way], len(chosen))
            rows.append(
                {
                    "way": way,
                    "budget": tokens,
                    "accuracy": float(values[way].mean()),
                    "low": low,
                    "high": high,
                    "spent": sum(one.spent for one in chosen) / len(chosen),
                    "suites": {
                        suite: float(np.mean([one.correct for one in chosen if one.suite == suite]))
                        for suite in sorted({one.suite for one in chosen})
                    },
                }
            )
        rows[-1] |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
    return {
        "command": command,
        "problems": plan.problems,
        "seeds": list(plan.seeds),
        "strategy": STRATEGY,
        "rows": rows,
    }


def markdown(told: dict[str, Any]) -> str:
    """Return the table of a document, and the command that makes it."""
    suites = list(told["rows"][0]["suites"])
    lines = [
        f"{told['problems']} held-out problems of both suites, {len(told['seeds'])} seeds, "
        f"{told['strategy']['name']} with up to {told['strategy']['n']} solutions. Budgets are tokens per problem, "
        "the verifier's included; `shared`: one budget for all problems together.",
        "",
        f"| budget | way | solved | 95 % interval | {' | '.join(suites)} | spent | shared over even, same problems |",
        f"|---:|---|---:|---|{'---:|' * len(suites)}---:|---|",
    ]
    for row in told["rows"]:
        gain = "" if "gain" not in row else f"{row['gain']:+.3f} ({row['gain_low']:+.3f} – {row['gain_high']:+.3f})"
        each = " | ".join(f"{row['suites'][suite]:.3f}" for suite in suites)
        lines.append(
            f"| {row['budget']} | {row['way']} | {row['accuracy']:.3f} | {row['low']:.3f} – {row['high']:.3f} "
            f"| {each} | {row['spent']:.0f} | {gain} |"
        )
    return "\n".join([*lines, "", f"`{told['command']}`", ""])


def _chosen(found: Sequence[Solved], way: Way, tokens: int) -> list[Solved]:
    return [one for one in found if one.way == way and one.tokens == tokens]


def _by_problem(found: Sequence[Solved], way: Way, tokens: int) -> Values:
    """Return the share of seeds that solved each problem, in one order of problems for all runs."""
    solved: dict[str, list[bool]] = {}
    for one in _chosen(found, way, tokens):
        solved.setdefault(one.problem, []).append(one.correct)
    return np.array([np.mean(solved[problem]) for problem in sorted(solved)])
