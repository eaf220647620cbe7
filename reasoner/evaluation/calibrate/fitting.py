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
from reasoner.confidence.novelty import compute_gain
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


def _create_stage(name: str, n: int, **params: int) -> StrategySpec:
    return StrategySpec.model_validate({"name": name, "n": n, **params})


VOTES: Stages = tuple(_create_stage("self_consistency", n) for n in (1, 1, 1, 1, 2, 2, 4, 4))
TREES: tuple[StrategySpec, ...] = (_create_stage("best_first", 8), _create_stage("beam", 16, expansions=4))
"""Tree searches, each measured on every problem of the fit if a verifier scores their steps."""
THOUGHTS: tuple[StrategySpec, ...] = (_create_stage("early_exit", 8), _create_stage("first_finished", 8, first=3))
"""Searches that save thoughts, each measured on every problem of the fit if the policy thinks."""


def list_menu(measured: Stages) -> tuple[Stages, ...]:
    """Return the lists of stages from which each bin selects one: votes of several sizes, or a measured stage."""
    return ((), VOTES[:2], VOTES[:5], VOTES, *((stage,) for stage in measured))


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


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule by which ``auto`` chooses and stops."""

    curve: Curve
    confidence: float
    least_gain: float = 0.0

    def stops(self, candidates: Sequence[Candidate]) -> bool:
        """Return True if the best answer is probable enough, or a better one is unlikely to be new."""
        probability = _predict_best(self.curve, candidates)[0]
        counts = Counter(candidate.answer for candidate in candidates)
        silent = counts.pop(None, 0)
        gain = compute_gain(probability, list(counts.values()), silent)
        return probability >= self.confidence or gain < self.least_gain


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of each list of stages on the problems of one bin of difficulty, whose upper edge is ``below``."""

    below: float
    members: list[Measured]
    choices: list[tuple[Stages, list[Path]]]


def gather(trials: Iterable[Trial], pool_spec: StrategySpec = POOL) -> list[Measured]:
    """Group the trials by problem; problems without a pool, the trial of ``pool_spec``, are omitted."""
    by_problem: dict[str, dict[str, Trial]] = defaultdict(dict)
    for trial in trials:
        by_problem[trial.problem][trial.stage] = trial
    measured = []
    for stages in by_problem.values():
        if (pool := stages.get(get_stage_name(pool_spec))) is not None:
            costs = [candidate.verified for candidate in pool.candidates if candidate.score is not None] or [0]
            head = max(costs) - median(costs)
            measured.append(Measured(pool.suite, tuple(pool.candidates), head=head, each=median(costs), stages=stages))
    return measured


def fit_curve(problems: Sequence[Measured], *, uses_votes: bool = True) -> Curve:
    """Fit a logistic regression on every answer in every prefix of the pools, whose samples vote independently.

    Without ``uses_votes`` the answer with the highest score is the most probable one.

    All suites have the same weight, as have all problems of a suite and all prefixes of a pool. Raises
    ``CalibrationError`` if no solution states an answer.
    """
    rows, right, weight = examples(problems)
    if not uses_votes:
        rows = rows * [not name.endswith("votes") for name in FEATURES]
    return Curve.model_validate(dict(zip(FEATURES, map(float, _fit_by_newton(rows, right, weight)), strict=True)))


def examples(problems: Sequence[Measured]) -> tuple[Array, Array, Array]:
    """Return features, correctness (0 or 1), and weights that sum to 1."""
    rows, right, weight = [], [], []
    for problem, problem_weight in zip(problems, _weigh_members(problems, problems), strict=True):
        pools = [hide_repeated_scores(problem.pool[:n]) for n in PREFIXES if n <= len(problem.pool)]
        votes = [collect_evidence(pool) for pool in pools]
        for pool, answers in zip(pools, votes, strict=True):
            silent = collect_silent(pool)
            for index, (_, is_right) in enumerate(answers):
                rows.append(compute_features([*(evidence for evidence, _ in answers), *silent], index))
                right.append(float(is_right))
                weight.append(problem_weight / (len(votes) * len(answers)))
    if not rows:
        raise CalibrationError(
            f"of {len(problems)} problems no solution states an answer, so that nothing can be fitted: raise --limit, "
            "or take a suite that the model can answer"
        )
    return np.array(rows), np.array(right), np.array(weight) / np.sum(weight)


def collect_evidence(candidates: Sequence[Candidate]) -> list[tuple[Evidence, bool]]:
    """Return the distinct answers of the candidates, each with its evidence and its correctness."""
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.answer is not None:
            groups[candidate.answer].append(candidate)
    answers = []
    for group in groups.values():
        scores = [candidate.score for candidate in group if candidate.score is not None]
        answers.append((Evidence(len(group), max(scores, default=None)), group[0].right))
    return answers


def collect_silent(candidates: Sequence[Candidate]) -> list[Evidence]:
    """Return the evidence of the candidates that state no answer, which count together as a rival."""
    count = sum(candidate.answer is None for candidate in candidates)
    return [Evidence(count, None)] if count else []


def hide_repeated_scores(pool: Sequence[Candidate], scored: Iterable[str | None] = ()) -> list[Candidate]:
    """Return samples as ``auto`` sees them: only the first of each answer not in ``scored`` has a score.

    Scores that cost nothing, read while the sample was decoded, are there anyway.
    """
    seen = set(scored)
    samples = []
    for sample in pool:
        is_hidden = sample.answer in seen and sample.verified > 0
        samples.append(sample.model_copy(update={"score": None}) if is_hidden else sample)
        seen.add(sample.answer)
    return samples


def reliability(curve: Curve, problems: Sequence[Measured]) -> Reliability:
    """Measure the reliability of the curve on these problems."""
    rows, right, weight = examples(problems)
    predicted = _logistic(rows @ np.array([getattr(curve, name) for name in FEATURES]))
    bins = []
    for low in range(10):
        inside = (predicted >= low / 10) & ((predicted < (low + 1) / 10) | (low == 9))
        if (mass := float(weight[inside].sum())) > 0:
            mean, share = (float(np.average(values[inside], weights=weight[inside])) for values in (predicted, right))
            bins.append((mean, share, mass))
    error = sum(mass * abs(mean - share) for mean, share, mass in bins)
    brier = float(np.average((predicted - right) ** 2, weights=weight))
    return Reliability(answers=len(right), ece=min(error, 1.0), brier=brier, bins=bins)


def _fit_by_newton(rows: Array, right: Array, weight: Array) -> Array:
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


def mean_cost(problems: Sequence[Measured]) -> float:
    """Return the mean number of tokens of a sample, its score included."""
    costs = [_compute_cost(problem, [sample]) for problem in problems for sample in problem.pool]
    return sum(costs) / max(1, len(costs))


def try_menu(problems: Sequence[Measured], rule: Rule, menu: Sequence[Stages]) -> list[Tried]:
    """Return the problems of each bin, by difficulty, and what each list of stages does on them."""
    return [
        Tried(below, members, [(stages, [simulate(one, stages, rule) for one in members]) for stages in menu])
        for below, members in _group_by_difficulty(problems, rule.curve)
    ]


def choose_bins(problems: Sequence[Measured], tried: Sequence[Tried], worth: float) -> list[Bin]:
    """Return the bins, each with the stages that are the most valuable if a right answer is worth so many tokens."""
    bins = []
    for each in tried:
        weights = _weigh_members(each.members, problems)
        stages, paths = max(each.choices, key=lambda choice: _compute_value(choice[1], weights, worth))
        bins.append(
            Bin(
                below=each.below,
                stages=list(stages),
                problems=len(paths),
                accuracy=sum(path.right for path in paths) / len(paths),
                tokens=sum(path.tokens for path in paths) / len(paths),
            )
        )
    return bins


def simulate_bins(problem: Measured, bins: Sequence[Bin], rule: Rule) -> Path:
    """Simulate ``auto`` with the stages of the problem's bin."""
    chance = _estimate_difficulty(problem, rule.curve)
    return simulate(problem, tuple(next(each.stages for each in bins if chance < each.below)), rule)


def choose_from_pool(problem: Measured) -> Path:
    """Return the choice from all samples: the one with the highest score, without scores the most frequent answer."""
    tokens = problem.head + _compute_cost(problem, problem.pool)
    answered = [sample for sample in problem.pool if sample.answer is not None]
    scored = [sample for sample in answered if sample.score is not None]
    if scored:
        return Path(max(scored, key=lambda sample: sample.score or 0.0).right, tokens)
    votes = Counter(sample.answer for sample in answered)
    return Path(bool(answered) and max(answered, key=lambda sample: votes[sample.answer]).right, tokens)


def simulate(problem: Measured, stages: Stages, rule: Rule) -> Path:
    """Simulate ``auto`` with these stages."""
    num_samples = min(PROBE, len(problem.pool))
    candidates = hide_repeated_scores(problem.pool[:num_samples])
    tokens = problem.head + _compute_cost(problem, candidates)
    for stage in stages:
        if rule.stops(candidates):
            break
        if stage.name == "self_consistency":
            samples = problem.pool[num_samples : num_samples + stage.params["n"]]
            more = hide_repeated_scores(samples, [candidate.answer for candidate in candidates])
            num_samples += len(more)
            tokens += _compute_cost(problem, more)
        else:
            trial = problem.stages[get_stage_name(stage)]
            more = trial.candidates
            tokens += trial.tokens - problem.head
        candidates += more
    return Path(_predict_best(rule.curve, candidates)[1], tokens)


def _compute_cost(problem: Measured, samples: Sequence[Candidate]) -> float:
    return sum(sample.generated + problem.each * (sample.score is not None) for sample in samples)


def _predict_best(curve: Curve, candidates: Sequence[Candidate]) -> tuple[float, bool]:
    """Return the probability of the most probable answer, and its correctness."""
    answers = collect_evidence(candidates)
    evidence = [*(item for item, _ in answers), *collect_silent(candidates)]
    predictions = ((curve.predict(evidence, index), is_right) for index, (_, is_right) in enumerate(answers))
    return max(predictions, key=lambda prediction: prediction[0], default=(0.0, False))


def _group_by_difficulty(problems: Sequence[Measured], curve: Curve) -> list[tuple[float, list[Measured]]]:
    """Group the problems by difficulty; a small bin is merged with the next easier one, the last with the previous."""
    chances = [_estimate_difficulty(problem, curve) for problem in problems]
    bins: list[tuple[float, list[Measured]]] = []
    members: list[Measured] = []
    for low, below in pairwise((0.0, *EDGES)):
        members += [item for item, chance in zip(problems, chances, strict=True) if low <= chance < below]
        if len(members) >= FEWEST or (not bins and below == 1.0):
            bins.append((below, members))
            members = []
    return [*bins[:-1], (1.0, bins[-1][1] + members)]


def _estimate_difficulty(problem: Measured, curve: Curve) -> float:
    """Return the probability after the probe that the answer is right, below 1."""
    return min(_predict_best(curve, hide_repeated_scores(problem.pool[:PROBE]))[0], LAST)


def _weigh_members(members: Sequence[Measured], problems: Sequence[Measured]) -> list[float]:
    """Return weights of the members by which all suites of ``problems`` count equally."""
    sizes = Counter(problem.suite for problem in problems)
    return [1.0 / (len(sizes) * sizes[member.suite]) for member in members]


def _compute_value(paths: Sequence[Path], weights: Sequence[float], worth: float) -> float:
    return sum(w * (worth * path.right - path.tokens) for path, w in zip(paths, weights, strict=True))
