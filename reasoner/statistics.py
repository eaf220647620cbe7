"""The statistics of an evaluation: intervals, pass@N, and comparisons on the same problems."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reasoner.evaluation import Run

Z = 1.959963984540054
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: means over problems, with a 95 % interval of the accuracy."""

    strategy: str
    n: int
    accuracy: float
    low: float
    high: float
    tokens: float
    verifier_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A difference of accuracies on the same problems, with a 95 % interval (paired bootstrap over problems)."""

    name: str
    difference: float
    low: float
    high: float


def rows(runs: Sequence[Run]) -> list[Row]:
    """The table: every strategy and n that was run, the tree searches followed by the rule (``beam+rule``), and
    pass@N, the ceiling of everything that picks among N samples."""
    table: list[Row] = []
    for strategy, n in dict.fromkeys((run.strategy, run.n) for run in runs):
        chosen = _select(runs, strategy, n)
        table.append(_row(strategy, n, [float(run.correct) for run in chosen], chosen))
        if strategy == "beam":
            table.append(_row("beam+rule", n, [float(run.found) for run in chosen], chosen))
    largest = max((run.n for run in runs if run.strategy == "self_consistency"), default=0)
    pool = _select(runs, "self_consistency", largest)
    for n in sorted({run.n for run in runs if run.strategy == "self_consistency"}):
        values = [pass_at(n, run.samples, run.right) for run in pool]
        row = _row("pass@n", n, values, pool)
        table.append(Row("pass@n", n, row.accuracy, row.low, row.high, row.tokens * n / largest, 0.0, row.seconds))
    return table


def comparisons(runs: Sequence[Run], n: int) -> list[Comparison]:
    """What the strategies claim about each other at this ``n``, where the runs hold both sides."""
    results = []
    for better, worse in (
        ("self_consistency", "greedy"),
        ("weighted_vote", "greedy"),
        ("best_of_n", "greedy"),
        ("beam", "greedy"),
        ("weighted_vote", "self_consistency"),
        ("best_of_n", "self_consistency"),
        ("beam", "best_of_n"),
    ):
        ours = _select(runs, better, n)
        theirs = _select(runs, worse, 1 if worse == "greedy" else n)
        if ours and theirs:
            pairs = [(float(a.correct), float(b.correct)) for a, b in zip(ours, theirs, strict=True)]
            results.append(_compare(f"{better} n={n} over {worse}", pairs))
    equal = _rule_at_equal_tokens(runs, n)
    return results if equal is None else [*results, equal]


def pass_at(n: int, samples: int, right: int) -> float:
    """Chance that at least one of ``n`` samples drawn from ``samples`` without putting back is right.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    n = min(n, samples)
    if samples - right < n:
        return 1.0
    return 1.0 - math.comb(samples - right, n) / math.comb(samples, n)


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927)."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + Z * Z / (2 * trials)
    spread = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _rule_at_equal_tokens(runs: Sequence[Run], n: int) -> Comparison | None:
    """Beam's candidates checked by the rule, against as many plain samples checked by the rule as cost the same.

    The number of samples is the mean bill of the beam, verifier included, over the mean length of a sample. Between
    two whole numbers of samples pass@N is interpolated.
    """
    beam = _select(runs, "beam", n)
    largest = max((run.n for run in runs if run.strategy == "self_consistency"), default=0)
    pool = _select(runs, "self_consistency", largest)
    if not beam or not pool:
        return None
    bill = sum(run.tokens + run.verifier_tokens for run in beam) / len(beam)
    length = sum(run.tokens for run in pool) / sum(run.samples for run in pool)
    samples = bill / length
    if samples > largest:
        return None
    below, part = int(samples), samples - int(samples)

    def reached(run: Run) -> float:
        lower = pass_at(below, run.samples, run.right) if below else 0.0
        return lower + part * (pass_at(below + 1, run.samples, run.right) - lower)

    pairs = [(float(a.found), reached(b)) for a, b in zip(beam, pool, strict=True)]
    return _compare(f"beam+rule n={n} over sampling+rule with {samples:.1f} samples (equal tokens)", pairs)


def _compare(name: str, pairs: Sequence[tuple[float, float]]) -> Comparison:
    differences = [a - b for a, b in pairs]
    low, high = _bootstrap(differences, lambda values: sum(values) / len(values))
    return Comparison(name, sum(differences) / len(differences), low, high)


def _bootstrap(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    rng = random.Random(0)
    draws = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return draws[round(0.025 * RESAMPLES)], draws[round(0.975 * RESAMPLES) - 1]


def _select(runs: Sequence[Run], strategy: str, n: int) -> list[Run]:
    return [run for run in runs if run.strategy == strategy and run.n == n]


def _row(strategy: str, n: int, values: Sequence[float], runs: Sequence[Run]) -> Row:
    count = len(runs)
    low, high = wilson(sum(values), count)
    return Row(
        strategy=strategy,
        n=n,
        accuracy=sum(values) / count,
        low=low,
        high=high,
        tokens=sum(run.tokens for run in runs) / count,
        verifier_tokens=sum(run.verifier_tokens for run in runs) / count,
        seconds=sum(run.seconds for run in runs) / count,
    )
