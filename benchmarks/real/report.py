"""Report of the measurement: ``results.json``, ``table.md`` and ``chart.png`` from the runs of all tasks.

Differences are between strategies on the same problems; a p-value is that of a sign-flip test over problems.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.real.chart import draw_tasks
from reasoner.evaluation.plan import BEST_OF_N, CEILING, GREEDY, MAJORITY
from reasoner.evaluation.runs import RUNS_FILE, Run, collect_runs, read_items
from reasoner.evaluation.statistics import Bootstrap, Estimate, ProblemScores, Row, sign_flip_p_value

AUTO = "auto"
WEIGHTED_VOTE = "weighted_vote"
SMALL_N, TARGET_N = 4, 16


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two accuracies on the same problems, with a 95 % interval and a p-value."""

    task: str
    question: str
    strategy: str
    over: str
    difference: float
    low: float
    high: float
    p: float
    tokens: float
    """Ratio of the tokens of both, the verifier's included."""


class TaskResults:
    """The runs of one task by strategy and n. Those that an interruption left without some problems are left out."""

    def __init__(self, task: str, runs: Sequence[Run]) -> None:
        self.task = task
        problems = list(dict.fromkeys(run.problem for run in runs))
        grouped: dict[tuple[str, int], list[Run]] = {}
        for run in runs:
            named = replace(run, strategy=AUTO) if run.strategy.startswith(f"{AUTO}:") else run  # whatever its family
            grouped.setdefault((named.strategy, named.n), []).append(named)
        complete = {key: runs for key, runs in grouped.items() if len({run.problem for run in runs}) == len(problems)}
        self.scores = {key: ProblemScores(group, problems) for key, group in complete.items()}
        self.problems = len(problems)
        self._bootstrap = Bootstrap(self.problems)

    @property
    def rows(self) -> list[Row]:
        """The rows of the table, by strategy and n; the ceiling only at the n of the votes."""
        ns = {n for strategy, n in self.scores if strategy not in (CEILING, MAJORITY)} - {0}
        shown = [key for key in self.scores if key[1] in ns or key[0] not in (CEILING, MAJORITY)]
        return [self.scores[key].row() for key in sorted(shown, key=_order)]

    def compare(self, question: str, ours: tuple[str, int], theirs: tuple[str, int], tests: int = 1) -> Difference:
        """Return the difference of two cases. The p-value is corrected for a choice among ``tests`` (Bonferroni)."""
        one, other = self.scores[ours], self.scores[theirs]
        values = one.column("correct") - other.column("correct")
        estimate = Estimate.from_means(self._bootstrap.means(values))
        cost = float(one.column("total_tokens").mean() / other.column("total_tokens").mean())
        p = min(1.0, tests * sign_flip_p_value(values))
        names = (_name(ours), _name(theirs))
        return Difference(self.task, question, *names, estimate.value, estimate.low, estimate.high, p, cost)

    def differences(self) -> list[Difference]:
        """Return the comparisons that the benchmark is for, as far as their strategies were run."""
        found = []
        chosen = [key for key in self.scores if key[1] == TARGET_N and key[0] not in (CEILING, GREEDY, AUTO)]
        if chosen and (GREEDY, 1) in self.scores:
            best = max(chosen, key=lambda key: self.scores[key].column("correct").mean())
            found.append(self.compare("best at 16 over greedy", best, (GREEDY, 1), tests=len(chosen)))
        for question, ours, theirs in (
            *(("weighted over plain vote", (WEIGHTED_VOTE, n), (MAJORITY, n)) for n in (SMALL_N, TARGET_N)),
            ("auto over best of 16", (AUTO, TARGET_N), (BEST_OF_N, TARGET_N)),
        ):
            if ours in self.scores and theirs in self.scores:
                found.append(self.compare(question, ours, theirs))
        return found


def write_report(folder: Path, command: str) -> list[TaskResults]:
    """Write the three files from every folder in ``folder`` that has runs; return the results by task."""
    results = []
    for path in sorted(folder.glob(f"*/{RUNS_FILE}")):
        header, items = read_items(path)
        failed = {item.problem for item in items if item.failed is not None}
        runs = [run for run in collect_runs(items) if run.problem not in failed]
        if runs:
            results.append(TaskResults(str(header["suite"]).removeprefix("reasoning-gym:"), runs))
    everything = [_join(results)] if len(results) > 1 else []
    differences = [difference for result in [*everything, *results] for difference in result.differences()]
    document = {
        "command": command,
        "tasks": [
            {"task": result.task, "problems": result.problems, "rows": [asdict(row) for row in result.rows]}
            for result in results
        ],
        "all tasks": [asdict(row) for result in everything for row in result.rows],
        "differences": [asdict(difference) for difference in differences],
    }
    (folder / "results.json").write_text(json.dumps(document, indent=2) + "\n")
    (folder / "table.md").write_text(format_report([*everything, *results], differences, command))
    draw_tasks([(result.task, result.rows) for result in results], folder / "chart.png")
    return results


def _join(results: Sequence[TaskResults]) -> TaskResults:
    """Return the runs of all tasks as those of one."""
    runs = [
        replace(run, problem=f"{result.task} {run.problem}")
        for result in results
        for scores in result.scores.values()
        for run in scores.runs
    ]
    return TaskResults("all tasks", runs)


def format_report(results: Sequence[TaskResults], differences: Sequence[Difference], command: str) -> str:
    """Return the Markdown tables."""
    parts = [f"    {command}", "Differences in points on the same problems; intervals from a bootstrap over problems."]
    lines = [
        "| task | comparison | strategies | points | 95 % interval | p | tokens |",
        "|---|---|---|---:|---|---:|---:|",
    ]
    for item in differences:
        cells: list[Any] = [item.task, item.question, f"{item.strategy} less {item.over}"]
        cells += [f"{100 * item.difference:+.1f}", f"{100 * item.low:+.1f} – {100 * item.high:+.1f}"]
        cells += [f"{item.p:.4f}" if item.p >= 0.0001 else "< 0.0001", f"{item.tokens:.2f} ×"]
        lines.append("| " + " | ".join(cells) + " |")
    parts.append("\n".join(lines))
    for result in results:
        lines = [
            "| strategy | N | accuracy | 95 % interval | any right | tokens | verifier | seconds |",
            "|---|" + "---:|" * 7,
        ]
        for row in result.rows:
            lines.append(
                f"| {row.strategy} | {row.n} | {row.accuracy:.3f} | {row.low:.3f} – {row.high:.3f} | "
                f"{row.reached:.3f} | {row.tokens + row.verifier_tokens:.0f} | {row.verifier_tokens:.0f} | "
                f"{row.seconds:.2f} |"
            )
        seeds = max(row.seeds for row in result.rows)
        parts += [
            f"### {result.task}",
            f"{result.problems} problems, {seeds} seeds; means of one problem.",
            "\n".join(lines),
        ]
    return "\n\n".join(parts) + "\n"


def _name(key: tuple[str, int]) -> str:
    return GREEDY if key[0] == GREEDY else f"{key[0]} at {key[1]}"


def _order(key: tuple[str, int]) -> tuple[bool, bool, str, int]:
    return key[0] == CEILING, key[0] != GREEDY, *key
