"""Fit the calibration of ``auto`` to trials: the curve of probabilities, and the stages for each difficulty.

``auto`` is simulated on the trials with each selectable list of stages, by the same rules: the probe is the head of a
problem's pool, a vote takes the pool's next samples, another strategy adds the candidates and the bill of its own
trial, and after each stage the curve decides whether to stop. For each bin of difficulty the most valuable stages are
selected: a right answer is worth ``worth`` tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from reasoner.confidence.calibration import Bin, CalibrationError, Curve, Reliability
from reasoner.confidence.posterior import FEATURES, Evidence, compute_features
from reasoner.evaluation.calibrate.trials import POOL, Candidate, Trial, get_stage_name
from reasoner.jobs.spec import StrategySpec

Stages = tuple[StrategySpec, ...]
Array = NDArray[np.float64]

EDGES = (0.02, 0.1, 0.3, 0.6, 1.0)
"""Upper edges of the bins of difficulty: the probability after the probe that the answer is right."""
LAST = 0.999999
"""Probabilities above this are clipped to it, so that 1 is in the last bin."""
FEWEST = 12
"""Minimum number of problems of a bin; a smaller one is merged with the next."""
PROBE = 2
"""Number of samples of the probe: the smallest number that can agree."""
PREFIXES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Sizes of the pool prefixes on which the curve is fitted."""
RIDGE = 1e-4


def stage(name: str, n: int, **params: int) -> StrategySpec:
    return StrategySpec.model_validate({"name": name, "n": n, **params})


VOTES: Stages = tuple(stage("self_consistency", n) for n in (1, 1, 1, 1, 2, 2, 4, 4))
TREES: tuple[StrategySpec, ...] = (stage("best_first", 8), stage("beam", 16, expansions=4))
"""Tree searches, each measured on every problem of the fit."""
MENU: tuple[Stages, ...] = ((), VOTES[:2], VOTES[:5], VOTES, *((tree,) for tree in TREES))
"""Lists of stages from which each bin selects one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All trials of one problem."""

    suite: str
    pool: tuple[Candidate, ...]
    head: float
    """Number of tokens of the question, which the verifier reads once."""
    each: float
    """Number of tokens that the verifier reads for each solution."""
    stages: dict[str, Trial]


@dataclass(frozen=True, slots=True)
class Path:
    """Simulated result of a sequence of stages on one problem."""

    right: bool
    tokens: float


def gather(trials: Iterable[Trial]) -> list[Measured]:
    """Group the trials by problem; problems without a pool are omitted."""
    by_problem: dict[str, dict[str, Trial]] = defaultdict(dict)
    for trial in trials:
        by_problem[trial.problem][trial.stage] = trial
    measured = []
    for found in by_problem.values():
        pool = found.get(get_stage_name(POOL))
        if pool is None:
            continue
        costs = [one.verified for one in pool.candidates if one.score is not None] or [0]
        measured.append(Measured(pool.suite, tuple(pool.candidates), max(costs) - median(costs), median(costs), found))
    return measured


def fit_curve(problems: Sequence[Measured]) -> Curve:
    """Fit a logistic regression on every answer in every prefix of the pools, whose samples vote independently.

    All suites have the same weight, as have all problems of a suite and all prefixes of a pool. Raises
    ``CalibrationError`` if no solution states an answer.
    """
    rows, right, weight = examples(problems)
    values = _newton(rows, right, weight)
    return Curve.model_validate(dict(zip(FEATURES, map(float, values), strict=True)))


def examples(problems: Sequence[Measured]) -> tuple[Array, Array, Array]:
    """Return features, correctness (0 or 1), and weights that sum to 1."""
    rows, right, weight = [], [], []
    of_suite = Counter(problem.suite for problem in problems)
    for problem in problems:
        sets = [believed(veiled(problem.pool[:size])) for size in PREFIXES if size <= len(problem.pool)]
        for answers in sets:
            for place, (_, good) in enumerate(answers):
                rows.append(compute_features([evidence for evidence, _ in answers], place))
                right.append(float(good))
                weight.append(1.0 / (len(of_suite) * of_suite[problem.suite] * len(sets) * len(answers)))
    if not rows:
        raise CalibrationError(
            f"of {len(problems)} problems no solution states an answer, so that nothing can be fitted: raise --limit, "
            "or take a suite that the model can answer"
        )
    return np.array(rows), np.array(right), np.array(weight) / np.sum(weight)


def believed(candidates: Sequence[Candidate]) -> list[tuple[Evidence, bool]]:
    """Return the distinct answers of the candidates, each with its evidence and its correctness."""
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.answer is not None:
            groups[candidate.answer].append(candidate)
    return [
        (Evidence(len(group), max((one.score for one in group if one.score is not None), default=None)), group[0].right)
        for group in groups.values()
    ]


def veiled(pool: Sequence[Candidate], known: Iterable[str | None] = ()) -> list[Candidate]:
    """Return samples as ``auto`` sees them: only the first of each answer not in ``known`` has a score."""
    seen = set(known)
    shown = []
    for one in pool:
        shown.append(one.model_copy(update={"score": None}) if one.answer in seen else one)
        seen.add(one.answer)
    return shown


def reliability(curve: Curve, problems: Sequence[Measured]) -> Reliability:
    """Measure the reliability of the curve on these problems."""
    rows, right, weight = examples(problems)
    odds = rows @ np.array([getattr(curve, name) for name in FEATURES])
    predicted = _logistic(odds)
    bins, error = [], 0.0
    for low in range(10):
        inside = (predicted >= low / 10) & ((predicted < (low + 1) / 10) | (low == 9))
        if (mass := float(weight[inside].sum())) > 0:
            mean = float(np.average(predicted[inside], weights=weight[inside]))
            share = float(np.average(right[inside], weights=weight[inside]))
            bins.append((mean, share, mass))
            error += mass * abs(mean - share)
    brier = float(np.average((predicted - right) ** 2, weights=weight))
    return Reliability(answers=len(right), ece=min(error, 1.0), brier=brier, bins=bins)


def _newton(rows: Array, right: Array, weight: Array) -> Array:
    """Minimize the logistic loss by Newton's method with step halving.

    A full step may overshoot to where all probabilities saturate, from where the method diverges.
    """

    def loss(values: Array) -> float:
        odds = rows @ values
        return float(weight @ (np.logaddexp(0.0, odds) - right * odds) + 0.5 * RIDGE * values @ values)

    values = np.zeros(rows.shape[1])
    for _ in range(100):
        predicted = _logistic(rows @ values)
        gradient = rows.T @ (weight * (predicted - right)) + RIDGE * values
        hessian = (rows * (weight * predicted * (1.0 - predicted))[:, None]).T @ rows + RIDGE * np.eye(len(values))
        change = np.linalg.solve(hessian, gradient)
        before = loss(values)
        while loss(values - change) > before and np.abs(change).max() >= 1e-10:
            change /= 2
        values -= change
        if np.abs(change).max() < 1e-10:
            break
    return values


def _logistic(odds: Array) -> Array:
    """Return ``1 / (1 + exp(-odds))`` without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * odds))


def fit_stages(problems: Sequence[Measured], curve: Curve, *, confidence: float, worth: float) -> list[Bin]:
    """Return the bins, each with its most valuable stages."""
    bins = []
    for below, members in _bins(problems, curve):
        weights = _weights(members, problems)
        ways = [(stages, [simulate(one, stages, curve, confidence) for one in members]) for stages in MENU]
        stages, paths = max(ways, key=lambda way: _value(way[1], weights, worth))
        bins.append(
            Bin(
                below=below,
                stages=list(stages),
                problems=len(members),
                accuracy=sum(path.right for path in paths) / len(members),
                tokens=sum(path.tokens for path in paths) / len(members),
            )
        )
    return bins


def simulate(problem: Measured, stages: Stages, curve: Curve, confidence: float) -> Path:
    """Simulate ``auto`` with these stages."""
    drawn = min(PROBE, len(problem.pool))
    have = veiled(problem.pool[:drawn])
    tokens = problem.head + _cost(problem, have)
    for step in stages:
        if _belief(curve, have)[0] >= confidence:
            break
        if step.name == "self_consistency":
            more = veiled(problem.pool[drawn : drawn + step.params["n"]], [one.answer for one in have])
            drawn += len(more)
            tokens += _cost(problem, more)
        else:
            trial = problem.stages[get_stage_name(step)]
            more = trial.candidates
            tokens += trial.tokens - problem.head
        have += more
    return Path(_belief(curve, have)[1], tokens)


def _cost(problem: Measured, samples: Sequence[Candidate]) -> float:
    return sum(one.generated + problem.each * (one.score is not None) for one in samples)


def _belief(curve: Curve, candidates: Sequence[Candidate]) -> tuple[float, bool]:
    """Return the probability of the most probable answer, and its correctness."""
    answers = believed(candidates)
    evidence = [one for one, _ in answers]
    return max(
        ((curve.predict(evidence, place), good) for place, (_, good) in enumerate(answers)),
        key=lambda pair: pair[0],
        default=(0.0, False),
    )


def _bins(problems: Sequence[Measured], curve: Curve) -> list[tuple[float, list[Measured]]]:
    """Group the problems by difficulty; a small bin is merged with the next easier one, the last with the previous."""
    chances = [_belief(curve, veiled(one.pool[:PROBE]))[0] for one in problems]
    bins: list[tuple[float, list[Measured]]] = []
    members: list[Measured] = []
    for low, below in pairwise((0.0, *EDGES)):
        members += [one for one, chance in zip(problems, chances, strict=True) if low <= min(chance, LAST) < below]
        if len(members) >= FEWEST or (not bins and below == 1.0):
            bins.append((below, members))
            members = []
    before = bins.pop()
    return [*bins, (1.0, before[1] + members)]


def _weights(members: Sequence[Measured], problems: Sequence[Measured]) -> list[float]:
    suites = [one.suite for one in problems]
    return [1.0 / (len(set(suites)) * suites.count(one.suite)) for one in members]


def _value(paths: Sequence[Path], weights: Sequence[float], worth: float) -> float:
    return sum(w * (worth * path.right - path.tokens) for path, w in zip(paths, weights, strict=True))
