"""Comparisons of strategies on the same problems.

Baselines are greedy decoding, majority voting at equal tokens, the same strategy without a stopping rule, and a larger
model at equal FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reasoner.evaluation.plan import BEST_OF_N, CEILING, GREEDY, MAJORITY, EvaluationPlan, StrategyCase
from reasoner.evaluation.runs import Run
from reasoner.evaluation.statistics import Bootstrap, CostCurve, Estimate, ProblemScores, Row, Values


@dataclass(frozen=True, slots=True)
class StrategyComparison:
    """Difference of two accuracies with a 95 % interval (paired bootstrap over problems), and the ratio of costs.

    ``what`` names the quantity that is equal on both sides.
    """

    strategy: str
    n: int
    over: str
    what: str
    difference: float
    low: float
    high: float
    cost: float
    """Ratio of the costs of strategy and baseline: tokens, or FLOPs if the models differ."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class TokenSaving:
    """Ratio of majority voting's tokens to the strategy's at the same accuracy, with a 95 % interval.

    ``bound``: majority voting did not reach this accuracy with its samples, so the true ratio is larger.
    """

    strategy: str
    n: int
    times: float
    low: float
    high: float
    bound: bool


class Results:
    """The runs of an evaluation by model, strategy and n, on the problems that all of them have."""

    def __init__(self, runs: Sequence[Run], plan: EvaluationPlan) -> None:
        self.plan = plan
        grouped: dict[tuple[str, str, int], list[Run]] = {}
        for run in runs:
            grouped.setdefault((run.model, run.strategy, run.n), []).append(run)
        self.problems = list(dict.fromkeys(run.problem for run in runs))
        self._scores = {key: ProblemScores(group, self.problems) for key, group in grouped.items()}
        self._bootstrap = Bootstrap(len(self.problems))

    def rows(self) -> list[Row]:
        """Return the rows of the table: the plan's strategies in order, the larger models, and pass@n."""
        cases = [(case, scores) for case, _, scores in self._iterate_cases()]
        ordered = [scores for case, scores in cases if case.name == GREEDY]
        ordered += filter(None, (self._find(GREEDY, 1, model) for model in self.plan.against))
        ordered += [scores for case, scores in cases if case.name != GREEDY]
        ordered += filter(None, (self._find(CEILING, n) for n in self.plan.ns))
        return [scores.row() for scores in ordered]

    def comparisons(self) -> list[StrategyComparison]:
        """Return the comparisons of every case with each baseline that was run."""
        cases = [case for case in (*self.plan.live, *self.plan.pooled) if case.name != GREEDY]
        return [
            comparison for case, n, scores in self._iterate_cases() for comparison in self._compare(case, n, scores)
        ] + [
            comparison
            for model in self.plan.against
            for case in cases
            for comparison in self._compare_at_equal_flops(case, model)
        ]

    def savings(self) -> list[TokenSaving]:
        """Return the token ratio at equal accuracy of every case except majority voting."""
        curve = self._build_curve(MAJORITY, "total_tokens")
        savings = []
        for case, n, scores in self._iterate_cases():
            if curve is None or case.label == MAJORITY or case.name == GREEDY:
                continue
            needed, reached = curve.cost_of(self._bootstrap.means(scores.column("correct")))
            times = Estimate.from_means(needed / self._bootstrap.means(scores.column("total_tokens")))
            savings.append(
                TokenSaving(
                    case.label, n, times=times.value, low=times.low, high=times.high, bound=not bool(reached[0])
                )
            )
        return savings

    def document(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows()],
            "comparisons": [asdict(comparison) for comparison in self.comparisons()],
            "savings": [asdict(saving) for saving in self.savings()],
        }

    def _find(self, strategy: str, n: int, model: str | None = None) -> ProblemScores | None:
        return self._scores.get((model or self.plan.model, strategy, n))

    def _iterate_cases(self) -> Iterator[tuple[StrategyCase, int, ProblemScores]]:
        for case in (*self.plan.live, *self.plan.pooled):
            for n in case.counts(self.plan.ns if case in self.plan.pooled else self.plan.live_ns):
                if (scores := self._find(case.label, n)) is not None:
                    yield case, n, scores

    def _build_curve(self, strategy: str, cost: str) -> CostCurve | None:
        """Return the accuracy of a strategy as a function of a column of its runs."""
        by_n = sorted(
            (key[2], scores) for key, scores in self._scores.items() if key[:2] == (self.plan.model, strategy)
        )
        points = [(scores.column(cost), scores.column("correct")) for _, scores in by_n]
        return CostCurve(points, self._bootstrap) if points else None

    def _compare(self, case: StrategyCase, n: int, scores: ProblemScores) -> Iterator[StrategyComparison]:
        if case.name == GREEDY:
            return
        if (greedy := self._find(GREEDY, 1)) is not None:
            yield self._compare_paired(case, n, ours=scores, theirs=greedy, over=GREEDY, what="")
        if case.label != MAJORITY and (curve := self._build_curve(MAJORITY, "total_tokens")) is not None:
            yield self._compare_at_equal_tokens(case, n, scores=scores, value="correct", curve=curve, over=MAJORITY)
        if case in self.plan.live and (curve := self._build_curve(CEILING, "total_tokens")) is not None:
            yield self._compare_at_equal_tokens(
                case, n, scores=scores, value="reached", curve=curve, over="sampling, both ended by the rule"
            )
        if case.params and (plain := self._find(case.name, n)) is not None:
            yield self._compare_paired(case, n, ours=scores, theirs=plain, over=case.name, what="equal n")
        if case.name != BEST_OF_N and (best := self._find(BEST_OF_N, n)) is not None:
            yield self._compare_paired(case, n, ours=scores, theirs=best, over=BEST_OF_N, what="equal n")

    def _compare_paired(
        self, case: StrategyCase, n: int, ours: ProblemScores, theirs: ProblemScores, over: str, what: str
    ) -> StrategyComparison:
        means = self._bootstrap.means(ours.column("correct") - theirs.column("correct"))
        cost = float(ours.column("total_tokens").mean() / theirs.column("total_tokens").mean())
        return _create_comparison(case, n, over=over, what=what, means=means, cost=cost)

    def _compare_at_equal_tokens(
        self, case: StrategyCase, n: int, scores: ProblemScores, value: str, curve: CostCurve, over: str
    ) -> StrategyComparison:
        tokens = self._bootstrap.means(scores.column("total_tokens"))
        means = self._bootstrap.means(scores.column(value)) - curve.interpolate(tokens)
        cost, note = _measure_overhang(curve, tokens, over)
        return _create_comparison(
            case, n, over=over, what="nearest tokens" if note else "equal tokens", means=means, cost=cost, note=note
        )

    def _compare_at_equal_flops(self, case: StrategyCase, model: str) -> Iterator[StrategyComparison]:
        """Yield the comparison with a large model's greedy decoding, interpolated to its FLOPs."""
        large = self._find(GREEDY, 1, model)
        curve = self._build_curve(case.label, "flops")
        if large is None or curve is None:
            return
        flops = self._bootstrap.means(large.column("flops"))
        means = curve.interpolate(flops) - self._bootstrap.means(large.column("correct"))
        cost, note = _measure_overhang(curve, flops, case.label)
        what = "nearest FLOPs" if note else "equal FLOPs"
        yield _create_comparison(case, 0, over=f"{GREEDY} of {model}", what=what, means=means, cost=1 / cost, note=note)


def _create_comparison(
    case: StrategyCase, n: int, over: str, what: str, means: Values, cost: float, note: str = ""
) -> StrategyComparison:
    difference = Estimate.from_means(means)
    return StrategyComparison(
        case.label,
        n,
        over=over,
        what=what,
        difference=difference.value,
        low=difference.low,
        high=difference.high,
        cost=cost,
        note=note,
    )


def _measure_overhang(curve: CostCurve, cost: Values, name: str) -> tuple[float, str]:
    """Return the ratio of ``cost`` to the nearest cost of the curve (1 within its range), and a note."""
    least, most = float(np.exp(curve.costs[0, 0])), float(np.exp(curve.costs[-1, 0]))
    if cost[0] > most:
        return float(cost[0]) / most, f"{name} ends before that"
    if cost[0] < least:
        return float(cost[0]) / least, f"{name} starts above that"
    return 1.0, ""
