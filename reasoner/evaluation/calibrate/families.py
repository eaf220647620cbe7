"""Fit a table to trials, for all suites together and for each family of tasks, and check it on other problems.

What a score or a vote says differs from family to family: among two possible answers even a wrong one has many votes.
So each suite has a curve and stages of its own, and jobs name the family of their question. Of all pairs of a
confidence and a worth the cheapest is taken with which ``auto``, on the problems of the other folds, loses nothing
beside all samples of the pool; where there is none, the pool is sampled whole.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import mean, stdev

from reasoner.confidence.calibration import Bin, CalibrationError, Check, Curve, Family
from reasoner.evaluation.calibrate.fitting import (
    VOTES,
    Measured,
    Path,
    Stages,
    choose_bins,
    choose_from_pool,
    fit_curve,
    simulate_bins,
    try_menu,
)

log = logging.getLogger(__name__)

CONFIDENCES = (0.8, 0.9, 0.95, 0.99)
"""Probabilities at which a search may stop."""
FACTORS = (1.0, 4.0, 16.0, 64.0)
"""Multiples of the worth of a right answer."""
FOLDS = 5
CERTAIN = 1.0
WHOLE = (CERTAIN, 0.0)
"""The plan that samples all of the pool."""
WHOLE_POOL = [Bin(below=1.0, stages=list(VOTES), problems=0, accuracy=0.0, tokens=0.0)]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A curve and stages for some problems, and what ``auto`` did with such ones on those that were not fitted."""

    curve: Curve
    confidence: float
    bins: list[Bin]
    held_out: list[tuple[Measured, Path]]


def fit_table(problems: Sequence[Measured], menu: Sequence[Stages], worth: float) -> Fitted:
    """Return the cheapest table with which ``auto`` is level with the whole pool on problems that were not fitted.

    ``worth``: the least number of tokens that a right answer is worth. Raises ``CalibrationError`` if no solution
    states an answer.
    """
    held_out: dict[tuple[float, float], list[tuple[Measured, Path]]] = defaultdict(list)
    for fold in range(FOLDS):
        train = [problem for index, problem in enumerate(problems) if index % FOLDS != fold]
        held = problems[fold::FOLDS]
        curve = fit_curve(train)
        for confidence in CONFIDENCES:
            tried = try_menu(train, curve, menu, confidence)
            for factor in FACTORS:
                bins = choose_bins(train, tried, worth * factor)
                held_out[confidence, factor] += [(one, simulate_bins(one, bins, curve, confidence)) for one in held]
        held_out[WHOLE] += [(one, simulate_bins(one, WHOLE_POOL, curve, CERTAIN)) for one in held]
    checks = {plan: check(paths) for plan, paths in held_out.items()}
    level = [plan for plan, each in checks.items() if plan != WHOLE and each.accuracy >= each.reference]
    confidence, factor = plan = min(level, key=lambda plan: checks[plan].tokens, default=WHOLE)
    curve, bins = fit_curve(problems), WHOLE_POOL
    if plan != WHOLE:
        bins = choose_bins(problems, try_menu(problems, curve, menu, confidence), worth * factor)
    return Fitted(curve, confidence, bins, held_out[plan])


def fit_families(
    problems: Sequence[Measured], menu: Sequence[Stages], names: Mapping[str, str], *, worth: float, common: Fitted
) -> list[Family]:
    """Return a table for each suite, ``names`` by suite. A suite for which nothing can be fitted has none."""
    families = []
    for suite, name in names.items():
        try:
            own = fit_table([problem for problem in problems if problem.suite == suite], menu, worth)
        except CalibrationError as error:
            log.warning("%s has no table of its own: %s", name, error)
            continue
        shared = check([(problem, path) for problem, path in common.held_out if problem.suite == suite])
        families.append(
            Family(
                name=name,
                curve=own.curve,
                confidence=own.confidence,
                bins=own.bins,
                check=check(own.held_out),
                common=shared,
            )
        )
    return families


def check(held_out: Sequence[tuple[Measured, Path]]) -> Check:
    """Return what ``auto`` did on problems that were not fitted, beside the choice from all of their samples."""
    references = [choose_from_pool(problem) for problem, _ in held_out]
    paths = [path for _, path in held_out]
    differences = [path.right - best.right for path, best in zip(paths, references, strict=True)]
    return Check(
        problems=len(paths),
        accuracy=mean(path.right for path in paths),
        reference=mean(best.right for best in references),
        error=stdev(differences) / len(paths) ** 0.5 if len(paths) > 1 else 0.0,
        tokens=mean(path.tokens for path in paths),
        reference_tokens=mean(best.tokens for best in references),
    )


def name_families(suites: Iterable[str]) -> dict[str, str]:
    """Return a short name for each suite: its task or file, where two share one with the parameters."""
    names = list(dict.fromkeys(suites))
    short = {name: PurePath(name.removeprefix("reasoning-gym:").partition("?")[0]).stem for name in names}
    shared = Counter(short.values())
    return {name: short[name] if shared[short[name]] == 1 else re.sub(r"[^\w.=-]+", "-", name) for name in names}
