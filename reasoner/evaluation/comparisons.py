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
        self._sheets = {key: ProblemScores(found, self.problems) for key, found in grouped.items()}
        self._bootstrap = Bootstrap(len(self.problems))

    def rows(self) -> list[Row]:
        """Return the rows of the table: the plan's strategies in order, the larger models, and pass@n."""
        return [sheet.row() for sheet in self._asked()]

    def comparisons(self) -> list[StrategyComparison]:
        """Return the comparisons of every case with each baseline that was run."""
        return [claim for case, n, sheet in self._cases() for claim in self._claims(case, n, sheet)] + [
            claim
            for model in self.plan.against
            for case in self._curves()
            for claim in self._at_equal_flops(case, model)
        ]

    def savings(self) -> list[TokenSaving]:
        """Return the token ratio at equal accuracy of every case except majority voting."""
        curve = self._curve(MAJORITY, "bill", "correct")
        if curve is None:
            return []
        found = []
        for case, n, sheet in self._cases():
            if case.label == MAJORITY or case.name == GREEDY:
                continue
            needed, reached = curve.cost_of(self._bootstrap.means(sheet.column("correct")))
            times = Estimate.from_means(needed / self._bootstrap.means(sheet.total_tokens))
            found.append(TokenSaving(case.label, n, times.value, times.low, times.high, bound=not bool(reached[0])))
        return found

    def document(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows()],
            "comparisons": [asdict(claim) for claim in self.comparisons()],
            "savings": [asdict(saving) for saving in self.savings()],
        }

    def _sheet(self, strategy: str, n: int, model: str | None = None) -> ProblemScores | None:
        return self._sheets.get((model or self.plan.model, strategy, n))

    def _cases(self) -> Iterator[tuple[StrategyCase, int, ProblemScores]]:
        for case in (*self.plan.live, *self.plan.pooled):
            ns = self.plan.ns if case in self.plan.pooled else self.plan.live_ns
            for n in case.counts(ns):
                if (sheet := self._sheet(case.label, n)) is not None:
                    yield case, n, sheet

    def _curves(self) -> list[StrategyCase]:
        return [case for case in (*self.plan.live, *self.plan.pooled) if case.name != GREEDY]

    def _asked(self) -> Iterator[ProblemScores]:
        yield from (sheet for case, _, sheet in self._cases() if case.name == GREEDY)
        yield from (sheet for model in self.plan.against if (sheet := self._sheet(GREEDY, 1, model)) is not None)
        yield from (sheet for case, _, sheet in self._cases() if case.name != GREEDY)
        yield from (sheet for n in self.plan.ns if (sheet := self._sheet(CEILING, n)) is not None)

    def _curve(self, strategy: str, cost: str, value: str) -> CostCurve | None:
        sheets = sorted(
            (key[2], sheet) for key, sheet in self._sheets.items() if key[:2] == (self.plan.model, strategy)
        )
        points = [
            (sheet.total_tokens if cost == "bill" else sheet.column(cost), sheet.column(value)) for _, sheet in sheets
        ]
        return CostCurve(points, self._bootstrap) if points else None

    def _claims(self, case: StrategyCase, n: int, sheet: ProblemScores) -> Iterator[StrategyComparison]:
        greedy = self._sheet(GREEDY, 1)
        if case.name == GREEDY:
            return
        if greedy is not None:
            yield self._paired(case, n, sheet, greedy, GREEDY, "")
        if case.label != MAJORITY and (curve := self._curve(MAJORITY, "bill", "correct")) is not None:
            yield self._at_equal_tokens(case, n, sheet, "correct", curve, MAJORITY)
        if case in self.plan.live and (curve := self._curve(CEILING, "bill", "correct")) is not None:
            yield self._at_equal_tokens(case, n, sheet, "reached", curve, "sampling, both ended by the rule")
        plain = self._sheet(case.name, n)
        if case.params and plain is not None:
            yield self._paired(case, n, sheet, plain, case.name, "equal n")
        best = self._sheet(BEST_OF_N, n)
        if best is not None and case.name != BEST_OF_N:
            yield self._paired(case, n, sheet, best, BEST_OF_N, "equal n")

    def _paired(
        self, case: StrategyCase, n: int, ours: ProblemScores, theirs: ProblemScores, over: str, what: str
    ) -> StrategyComparison:
        difference = Estimate.from_means(self._bootstrap.means(ours.column("correct") - theirs.column("correct")))
        cost = float(ours.total_tokens.mean() / theirs.total_tokens.mean())
        return StrategyComparison(case.label, n, over, what, difference.value, difference.low, difference.high, cost)

    def _at_equal_tokens(
        self, case: StrategyCase, n: int, sheet: ProblemScores, value: str, curve: CostCurve, over: str
    ) -> StrategyComparison:
        bill = self._bootstrap.means(sheet.total_tokens)
        difference = Estimate.from_means(self._bootstrap.means(sheet.column(value)) - curve.interpolate(bill))
        cost, note = _beyond(curve, bill, over)
        return StrategyComparison(
            case.label, n, over, _nearest("tokens", note), difference.value, difference.low, difference.high, cost, note
        )

    def _at_equal_flops(self, case: StrategyCase, model: str) -> Iterator[StrategyComparison]:
        """Yield the comparison with a large model's greedy decoding, interpolated to its FLOPs."""
        large = self._sheet(GREEDY, 1, model)
        curve = self._curve(case.label, "flops", "correct")
        if large is None or curve is None:
            return
        flops = self._bootstrap.means(large.column("flops"))
        difference = Estimate.from_means(curve.interpolate(flops) - self._bootstrap.means(large.column("correct")))
        reach, note = _beyond(curve, flops, case.label)
        yield StrategyComparison(
            case.label,
            0,
            f"{GREEDY} of {model}",
            _nearest("FLOPs", note),
            difference.value,
            difference.low,
            difference.high,
            1 / reach,
            note,
        )


def _beyond(curve: CostCurve, cost: Values, name: str) -> tuple[float, str]:
    """Return the ratio of ``cost`` to the nearest cost of the curve (1 within its range), and a note."""
    least, most = float(np.exp(curve.costs[0, 0])), float(np.exp(curve.costs[-1, 0]))
    if cost[0] > most:
        return float(cost[0]) / most, f"{name} ends before that"
    if cost[0] < least:
        return float(cost[0]) / least, f"{name} starts above that"
    return 1.0, ""


def _nearest(what: str, note: str) -> str:
    return f"nearest {what}" if note else f"equal {what}"
