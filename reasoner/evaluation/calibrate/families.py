"""Fit a table to trials, for all suites together and for each family of tasks, and check it on other problems.

What a score or a vote says differs from family to family: among two possible answers even a wrong one has many votes.
So each suite has a curve and stages of its own, and jobs name the family of their question. Of all plans, with votes
or by scores alone, with several gains that are too small to go on for, the cheapest is taken with which ``auto``, on
problems that were not fitted, loses nothing beside all samples of the pool; where there is none, the pool is sampled
whole.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from statistics import mean, stdev
from typing import NamedTuple

from reasoner.confidence.calibration import Bin, CalibrationError, Check, Family
from reasoner.evaluation.calibrate.fitting import (
    VOTES,
    Measured,
    Path,
    Rule,
    Stages,
    Tried,
    choose_bins,
    choose_from_pool,
    fit_curve,
    simulate_bins,
    try_menu,
)

log = logging.getLogger(__name__)

CONFIDENCE = 0.95
"""Probability at which a search stops."""
LEAST_GAINS = (0.0, 0.03, 0.06, 0.1, 0.15)
"""Probabilities that a better answer is new, below which a search may stop."""
FACTORS = (1.0, 4.0, 16.0, 64.0)
"""Multiples of the worth of a right answer."""
FOLDS = 5
TURNS = 4
"""Orders of the pool in which a problem that was not fitted is solved."""
WHOLE_POOL = [Bin(below=1.0, stages=list(VOTES), problems=0, accuracy=0.0, tokens=0.0)]


class Plan(NamedTuple):
    """A way to fit a table."""

    uses_votes: bool
    """False for the choice by scores alone."""
    least_gain: float
    factor: float | None
    """Factor of a right answer's worth by which each bin gets its stages; ``None`` if all bins get the same."""
    choice: int = 0
    """Which stages of the menu, if all bins get the same."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A rule and stages for some problems, and what ``auto`` did with such ones on those that were not fitted."""

    rule: Rule
    bins: list[Bin]
    held_out: list[tuple[Measured, Path]]


def fit_table(problems: Sequence[Measured], menu: Sequence[Stages], worth: float) -> Fitted:
    """Return the cheapest table with which ``auto`` is level with the whole pool on problems that were not fitted.

    ``worth``: the least number of tokens that a right answer is worth. Raises ``CalibrationError`` if no solution
    states an answer.
    """
    held_out: dict[Plan, list[tuple[Measured, Path]]] = defaultdict(list)
    whole: dict[bool, list[tuple[Measured, Path]]] = defaultdict(list)
    for fold, uses_votes in itertools.product(range(FOLDS), (True, False)):
        train = [problem for index, problem in enumerate(problems) if index % FOLDS != fold]
        held = [turned for problem in problems[fold::FOLDS] for turned in _turn_pool(problem)]
        curve = fit_curve(train, uses_votes=uses_votes)
        for least_gain in LEAST_GAINS:
            rule = Rule(curve, CONFIDENCE, least_gain)
            tried = try_menu(train, rule, menu)
            for plan in _list_plans(uses_votes, least_gain, len(menu)):
                bins = _choose(plan, train, tried, worth)
                held_out[plan] += [(one, simulate_bins(one, bins, rule)) for one in held]
        whole[uses_votes] += [(one, simulate_bins(one, WHOLE_POOL, Rule(curve, 1.0))) for one in held]
    checks = {plan: check(paths) for plan, paths in held_out.items()}
    level = [plan for plan, each in checks.items() if each.accuracy >= each.reference]
    if not level:
        uses_votes = max(whole, key=lambda votes: check(whole[votes]).accuracy)
        return Fitted(Rule(fit_curve(problems, uses_votes=uses_votes), 1.0), WHOLE_POOL, whole[uses_votes])
    plan = min(level, key=lambda plan: checks[plan].tokens)
    rule = Rule(fit_curve(problems, uses_votes=plan.uses_votes), CONFIDENCE, plan.least_gain)
    return Fitted(rule, _choose(plan, problems, try_menu(problems, rule, menu), worth), held_out[plan])


def _list_plans(uses_votes: bool, least_gain: float, num_choices: int) -> list[Plan]:
    fitted = [Plan(uses_votes, least_gain, factor) for factor in FACTORS]
    return fitted + [Plan(uses_votes, least_gain, None, choice) for choice in range(num_choices)]


def _choose(plan: Plan, problems: Sequence[Measured], tried: Sequence[Tried], worth: float) -> list[Bin]:
    """Return the stages of each bin; one bin for all problems if they all get the same."""
    if plan.factor is not None:
        return choose_bins(problems, tried, worth * plan.factor)
    stages = tried[0].choices[plan.choice][0]
    paths = [path for each in tried for path in each.choices[plan.choice][1]]
    accuracy, tokens = mean(path.right for path in paths), mean(path.tokens for path in paths)
    return [Bin(below=1.0, stages=list(stages), problems=len(paths), accuracy=accuracy, tokens=tokens)]


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
                curve=own.rule.curve,
                confidence=own.rule.confidence,
                least_gain=own.rule.least_gain,
                bins=own.bins,
                check=check(own.held_out),
                common=shared,
            )
        )
    return families


def _turn_pool(problem: Measured) -> list[Measured]:
    """Return the problem with its pool begun at several places: which samples come first is chance."""
    size = len(problem.pool)
    starts = [turn * size // TURNS for turn in range(TURNS)]
    return [replace(problem, pool=problem.pool[start:] + problem.pool[:start]) for start in starts]


def check(held_out: Sequence[tuple[Measured, Path]]) -> Check:
    """Return what ``auto`` did on problems that were not fitted, beside the choice from all of their samples."""
    references = [choose_from_pool(problem) for problem, _ in held_out]
    paths = [path for _, path in held_out]
    turns = [path.right - best.right for path, best in zip(paths, references, strict=True)]
    differences = [mean(turns[first : first + TURNS]) for first in range(0, len(turns), TURNS)]
    return Check(
        problems=len(differences),
        accuracy=mean(path.right for path in paths),
        reference=mean(best.right for best in references),
        error=stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0,
        tokens=mean(path.tokens for path in paths),
        reference_tokens=mean(best.tokens for best in references),
    )


def name_families(suites: Iterable[str]) -> dict[str, str]:
    """Return a short name for each suite: its task or file, where two share one with the parameters."""
    names = list(dict.fromkeys(suites))
    short = {name: PurePath(name.removeprefix("reasoning-gym:").partition("?")[0]).stem for name in names}
    shared = Counter(short.values())
    return {name: short[name] if shared[short[name]] == 1 else re.sub(r"[^\w.=-]+", "-", name) for name in names}
