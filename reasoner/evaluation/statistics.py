"""Statistics of an evaluation: means over problems, with intervals for the population of problems and seeds.

Runs of one problem with several seeds are not independent, so a problem with all its seeds is one cluster, and the
bootstrap resamples clusters. Seeds of different problems share no noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from reasoner.evaluation.runs import Run

Z = 1.959963984540054
RESAMPLES = 10_000
FLIPS = 100_000
"""Number of assignments of signs in a permutation test; a multiple of 1000."""

Values = NDArray[np.float64]

_MEANS = (
    "tokens", "thought_tokens", "verifier_tokens", "seconds", "flops", "samples", "answered", "reached", "flexible",
)  # fmt: skip
"""Fields of ``Row`` that are means of the same fields of ``Run``."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: means over problems and seeds, with a 95 % interval of the accuracy."""

    strategy: str
    n: int
    accuracy: float
    low: float
    high: float
    tokens: float
    thought_tokens: float
    """Generated tokens of thoughts, a part of ``tokens``."""
    verifier_tokens: float
    seconds: float
    flops: float
    samples: float
    answered: float
    reached: float
    """Fraction of problems with a correct candidate: the accuracy of an ideal choice."""
    accuracy_strict: float
    """Accuracy if flexible answers count as wrong."""
    flexible: float
    """Fraction of problems whose answer was extracted at the flexible level."""
    model: str
    problems: int
    seeds: int


class ProblemScores:
    """Results of one strategy at one n by problem, as means over seeds."""

    def __init__(self, runs: Sequence[Run], problems: Sequence[str]) -> None:
        by_problem: dict[str, list[Run]] = {problem: [] for problem in problems}
        for run in runs:
            by_problem[run.problem].append(run)
        if missing := sum(not group for group in by_problem.values()):
            raise ValueError(f"{runs[0].strategy if runs else 'a strategy'} has no run of {missing} problems")
        self._groups = list(by_problem.values())
        self.runs = runs

    def column(self, name: str) -> Values:
        """Return the mean over seeds of an attribute of ``Run`` for each problem."""
        return np.array([sum(getattr(run, name) for run in group) / len(group) for group in self._groups])

    def row(self) -> Row:
        first = self.runs[0]
        correct = self.column("correct")
        low, high = clustered_wilson_interval(correct, len(self.runs))
        means = {name: float(self.column(name).mean()) for name in _MEANS}
        return Row(
            first.strategy,
            first.n,
            accuracy=float(correct.mean()),
            low=low,
            high=high,
            **means,
            accuracy_strict=float(self.column("correct_strict").mean()),
            model=first.model,
            problems=len(self._groups),
            seeds=len({run.seed for run in self.runs}),
        )


def pass_at_n(n: int, samples: int, right: int) -> float:
    """Return the probability that at least one of ``n`` samples taken without replacement is right.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    n = min(n, samples)
    if samples - right < n:
        return 1.0
    return 1.0 - math.comb(samples - right, n) / math.comb(samples, n)


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion (Wilson 1927), which contains the proportion also when rounded."""
    if trials == 0:
        return 0.0, 1.0
    centre = share + Z * Z / (2 * trials)
    spread = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return min(share, max(0.0, low)), max(share, min(1.0, high))


def clustered_wilson_interval(values: Values, runs: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of one proportion per problem.

    It is Wilson's with the effective number of trials, which matches the variance over problems (Korn and Graubard
    1998, "Confidence intervals for proportions with small expected number of positive counts estimated from survey
    data"). Unlike a bootstrap it keeps its coverage where nearly all problems are solved. ``runs`` bounds the number of
    trials.
    """
    count, share = len(values), float(values.mean())
    variance = float(values.var(ddof=1)) / count if count > 1 else 0.0
    trials = min(float(runs), share * (1 - share) / variance) if variance > 0 else float(count)
    return wilson_interval(share, trials)


class Bootstrap:
    """Bootstrap resamples of the problems, the same ones for everything that is compared.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3 (percentile intervals); clusters
    are resampled whole, without resampling the seeds inside (Davison and Hinkley 1997, section 3.8).
    """

    def __init__(self, problems: int, resamples: int = RESAMPLES) -> None:
        counts = np.random.default_rng(0).multinomial(problems, np.full(problems, 1 / problems), size=resamples)
        even = np.full((1, problems), 1 / problems)
        self._weights: Values = np.concatenate([even, counts / problems])

    def means(self, values: Values) -> Values:
        """Return the mean over the problems, followed by the mean of each resample."""
        return np.asarray(self._weights @ values)


def sign_flip_p_value(differences: Values, flips: int = FLIPS) -> float:
    """Return the two-sided p-value of a mean difference of zero, one difference for each problem.

    Without an effect each difference is as likely to have the other sign. All signs are tried where that is cheap, else
    ``flips`` random ones, with the observed ones counted (Phipson and Smyth 2010, "Permutation p-values should never be
    zero").
    """
    moved = differences[differences != 0]
    if len(moved) == 0:
        return 1.0
    exact = 2 ** len(moved) <= flips
    if exact:
        bits = np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))
        sums = (1.0 - 2.0 * (bits & 1)) @ moved
    else:
        rng = np.random.default_rng(0)
        sums = np.concatenate(
            [(1.0 - 2.0 * rng.integers(0, 2, (1_000, len(moved)))) @ moved for _ in range(flips // 1_000)]
        )
    extreme = int((np.abs(sums) >= abs(moved.sum()) - 1e-9).sum())
    return extreme / len(sums) if exact else (extreme + 1) / (len(sums) + 1)


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_means(cls, means: Values) -> Estimate:
        """Create from ``Bootstrap.means`` or a function of them: the estimate, followed by its resamples."""
        low, high = np.quantile(means[1:], (0.025, 0.975))
        return cls(float(means[0]), float(low), float(high))


class CostCurve:
    """Value as a function of cost for a family of cases, interpolated, for every resample of a bootstrap.

    Costs are interpolated on a logarithmic scale: accuracy grows roughly equally with each doubling.
    """

    def __init__(self, points: Sequence[tuple[Values, Values]], bootstrap: Bootstrap) -> None:
        """``points`` are the costs and values by problem of each case, cheapest first."""
        self.costs = np.stack([np.log(bootstrap.means(cost)) for cost, _ in points])
        self.values = np.stack([bootstrap.means(value) for _, value in points])

    def interpolate(self, cost: Values) -> Values:
        """Return the values at these costs for each resample, clamped to the ends of the curve."""
        log_cost = np.log(cost)
        result: Values = self.values[0]
        for left, (low, high) in enumerate(pairwise(self.costs)):
            share = np.clip((log_cost - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
            between = self.values[left] + share * (self.values[left + 1] - self.values[left])
            result = np.where(log_cost >= low, between, result)
        return result

    def cost_of(self, value: Values) -> tuple[Values, Values]:
        """Return the lowest cost at which the curve reaches each value (or its last cost), and if it reaches it."""
        reached = self.values[0] >= value
        costs = np.where(reached, self.costs[0], self.costs[-1])
        for left, (low, high) in enumerate(pairwise(self.values)):
            here = ~reached & (high >= value)
            share = (value - low) / np.where(high > low, high - low, 1.0)
            costs = np.where(here, self.costs[left] + share * (self.costs[left + 1] - self.costs[left]), costs)
            reached |= here
        return np.asarray(np.exp(costs)), reached
