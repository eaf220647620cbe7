"""Results of a matched evaluation: accuracy and spent amount of each strategy at each budget, paired by problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from reasoner.evaluation.matched.plan import MatchedPlan
from reasoner.evaluation.plan import CEILING, GREEDY, MAJORITY
from reasoner.evaluation.runs import Run
from reasoner.evaluation.statistics import Bootstrap, Estimate, ProblemScores, sign_flip_p_value

CURVE_NAMES = {CEILING: "pass@k", MAJORITY: "maj@k"}
"""Names of the curves of a pool that have one in the literature."""


@dataclass(frozen=True, slots=True)
class MatchedRow:
    """One strategy at one budget: means over problems and seeds, with 95 % intervals."""

    strategy: str
    budget: float | None
    """Limit of each problem; ``None`` of greedy decoding, which has none."""
    n: int
    """Number of samples that the budget paid for, on average, or the n of a live search."""
    accuracy: float
    low: float
    high: float
    spent: float
    """Mean amount of the quantity that is matched."""
    most_spent: float
    """Largest amount on a problem; of a strategy that is replayed, the mean over the places of the pool."""
    reached: float
    """Fraction of problems with a right candidate: pass@k of the candidates that the budget paid for."""
    gap: Estimate
    """Selection gap: ``reached`` less the accuracy, with the bootstrap's interval."""
    answered: float
    samples: float
    tokens: float
    verifier_tokens: float
    flops: float
    seconds: float
    cost: float
    model: str
    problems: int
    seeds: int
    is_on_front: bool = False
    """True if no row has a higher accuracy for less: it is on the Pareto front."""


@dataclass(frozen=True, slots=True)
class MatchedComparison:
    """Difference of accuracies on the same problems and seeds, with a 95 % interval of the paired bootstrap."""

    strategy: str
    budget: float
    over: str
    difference: float
    low: float
    high: float
    p_value: float
    """The result of a two-sided permutation test, which flips the signs of the problems' differences."""
    cost: float
    """Spent amount over the baseline's."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Accuracy of a choice among k samples of the pool; ``gap`` is pass@k less that accuracy."""

    strategy: str
    k: int
    accuracy: float
    low: float
    high: float
    gap: Estimate
    tokens: float


class MatchedResults:
    """The runs of a matched evaluation, on the problems that all strategies have."""

    def __init__(self, runs: Sequence[Run], plan: MatchedPlan) -> None:
        self.plan = plan
        self.problems = list(dict.fromkeys(run.problem for run in runs))
        grouped: dict[tuple[str, float | None, int], list[Run]] = {}
        for run in runs:
            # The n of a budget is its result, and differs from problem to problem.
            n = run.n if run.budget is None else 0
            grouped.setdefault((run.strategy, run.budget, n), []).append(run)
        self._scores = {
            key: ProblemScores(group, self.problems)
            for key, group in grouped.items()
            if {run.problem for run in group} == {*self.problems}
        }
        self._bootstrap = Bootstrap(len(self.problems))

    def rows(self) -> list[MatchedRow]:
        """Return greedy decoding, each case at each budget, and the ceiling of sampling at each budget."""
        rows = [self._make_row(GREEDY, None)]
        rows += [self._make_row(label, budget) for label in self._list_labels() for budget in self.plan.budgets]
        front = find_front([(row.spent, row.accuracy) for row in rows])
        rows = [replace(row, is_on_front=index in front) for index, row in enumerate(rows)]
        return rows + [self._make_row(CEILING, budget) for budget in self.plan.budgets]

    def comparisons(self) -> list[MatchedComparison]:
        """Return the differences of every case at every budget to the baseline at the same, and to greedy decoding."""
        greedy = self._scores[GREEDY, None, 1]
        return [
            self._compare(label, budget, over=over, theirs=theirs)
            for label in self._list_labels()
            for budget in self.plan.budgets
            for over, theirs in ((self.plan.baseline, self._scores[self.plan.baseline, budget, 0]), (GREEDY, greedy))
            if label != over
        ]

    def curves(self) -> list[CurvePoint]:
        """Return pass@k, maj@k and the other pooled cases at every k that the pools of all problems have."""
        labels = [CEILING, *(case.label for case in self.plan.pooled)]
        sizes = sorted({k for strategy, budget, k in self._scores if budget is None and strategy == CEILING})
        return [self._make_point(label, k) for label in labels for k in sizes if (label, None, k) in self._scores]

    def document(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows()],
            "comparisons": [asdict(comparison) for comparison in self.comparisons()],
            "curves": [asdict(point) for point in self.curves()],
        }

    def _list_labels(self) -> list[str]:
        return [case.label for case in self.plan.cases]

    def _make_row(self, strategy: str, budget: float | None) -> MatchedRow:
        scores = self._scores[strategy, budget, 1 if budget is None else 0]
        row, column = scores.row(), scores.column
        gap = self._bootstrap.means(column("reached") - column("correct"))
        return MatchedRow(
            strategy=strategy,
            budget=budget,
            n=round(float(column("n").mean())),
            accuracy=row.accuracy,
            low=row.low,
            high=row.high,
            spent=float(column(self.plan.quantity.column).mean()),
            most_spent=max(getattr(run, self.plan.quantity.column) for run in scores.runs),
            reached=row.reached,
            gap=Estimate.from_means(gap),
            answered=row.answered,
            samples=row.samples,
            tokens=row.tokens,
            verifier_tokens=row.verifier_tokens,
            flops=row.flops,
            seconds=row.seconds,
            cost=float(column("cost").mean()),
            model=row.model,
            problems=row.problems,
            seeds=row.seeds,
        )

    def _compare(self, label: str, budget: float, over: str, theirs: ProblemScores) -> MatchedComparison:
        ours, column = self._scores[label, budget, 0], self.plan.quantity.column
        differences = ours.column("correct") - theirs.column("correct")
        estimate = Estimate.from_means(self._bootstrap.means(differences))
        return MatchedComparison(
            strategy=label,
            budget=budget,
            over=over,
            difference=estimate.value,
            low=estimate.low,
            high=estimate.high,
            p_value=sign_flip_p_value(differences),
            cost=float(ours.column(column).mean() / max(1e-300, float(theirs.column(column).mean()))),
        )

    def _make_point(self, label: str, k: int) -> CurvePoint:
        scores, ceiling = self._scores[label, None, k], self._scores[CEILING, None, k]
        row = scores.row()
        gap = self._bootstrap.means(ceiling.column("correct") - scores.column("correct"))
        return CurvePoint(
            CURVE_NAMES.get(label, f"{label}@k"),
            k,
            accuracy=row.accuracy,
            low=row.low,
            high=row.high,
            gap=Estimate.from_means(gap),
            tokens=row.tokens + row.verifier_tokens,
        )


def find_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return the indices of the points (cost, value) that no other point beats: none costs at most as much for more.

    Of equal points all are on the front.
    """

    def beats(other: tuple[float, float], point: tuple[float, float]) -> bool:
        return other != point and other[0] <= point[0] and other[1] >= point[1]

    return {index for index, point in enumerate(points) if not any(beats(other, point) for other in points)}
