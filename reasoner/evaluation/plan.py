"""The plan of an evaluation: strategies with parameters, values of n, and seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reasoner.jobs.candidate_spec import MAX_N
from reasoner.strategies.base import Feature, VerifierUse
from reasoner.strategies.registry import STRATEGIES, parse_params

MAJORITY = "self_consistency"
"""Baseline strategy for comparisons at equal tokens."""
GREEDY = "greedy"
BEST_OF_N = "best_of_n"
CEILING = "pass@n"
"""Name of the upper bound for every choice among n samples: the probability that at least one of them is right."""
POOL = "pool"
POOLED = frozenset({"self_consistency", "best_of_n", "weighted_vote"})
"""Strategies that need only n independent samples and their scores."""
DEEPCONF = "deepconf"
"""Strategy that is pooled only if it ranks finished solutions with the default number of top log-probabilities."""


@dataclass(frozen=True, slots=True)
class StrategyCase:
    """A strategy with parameters, as the command line names it: ``self_consistency:stop=beta:threshold=0.9``."""

    label: str
    name: str
    params: tuple[tuple[str, Any], ...] = ()
    confidence: float | None = None
    """The job's ``confidence``, for strategies with early stopping; written as a parameter: ``auto:confidence=0.9``."""

    @property
    def takes_n(self) -> bool:
        """True if the strategy has a parameter n that the evaluation chooses."""
        return "n" in STRATEGIES[self.name].params.model_fields and "n" not in dict(self.params)

    def counts(self, ns: Sequence[int]) -> Sequence[int]:
        """Return the values of n at which the strategy runs: ``ns``, or its own n."""
        return ns if self.takes_n else (dict(self.params).get("n", 1),)

    def to_spec(self, n: int) -> dict[str, Any]:
        """Return the ``strategy`` field of the job."""
        return {"name": self.name, **dict(self.params), **({"n": n} if self.takes_n else {})}


@dataclass(frozen=True, slots=True)
class StageBudget:
    """The budget of each job of a stage: an amount of one quantity, a field of ``Budget``."""

    quantity: str
    amount: float


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass over the problems with one seed: a pool of samples, or one live search at one n."""

    name: str
    model: str
    seed: int
    case: StrategyCase | None
    """Strategy of a live stage; ``None`` for the pool."""
    n: int
    budget: StageBudget | None = None


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The strategies, sizes and seeds of one evaluation.

    Cases in ``pooled`` decide on one pool of samples at the largest of ``ns``; cases in ``live`` run at each of
    ``live_ns``. Models in ``against`` decode greedily, as baselines for a smaller model's search.
    """

    model: str
    pooled: tuple[StrategyCase, ...]
    live: tuple[StrategyCase, ...]
    ns: tuple[int, ...]
    live_ns: tuple[int, ...]
    seeds: int = 1
    against: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    """Further models from which strategies sample besides ``model``."""

    def stages(self) -> list[Stage]:
        """Return the stages in order of execution. Greedy decoding is deterministic, so one seed suffices."""
        stages = [Stage(case.label, self.model, seed=0, case=case, n=1) for case in self.live if case.name == GREEDY]
        stages += [
            Stage(f"{GREEDY} {model}", model, seed=0, case=StrategyCase(GREEDY, GREEDY), n=1) for model in self.against
        ]
        for seed in range(self.seeds):
            if self.pooled:
                stages.append(Stage(POOL, self.model, seed=seed, case=None, n=self.ns[-1]))
            for case in (case for case in self.live if case.name != GREEDY):
                for n in case.counts(self.live_ns):
                    name = f"{case.label} n={n}" if case.takes_n else case.label
                    stages.append(Stage(name, self.model, seed=seed, case=case, n=n))
        return stages

    def document(self) -> dict[str, Any]:
        """Return everything that determines the runs, as JSON."""
        return {
            "strategies": [case.label for case in (*self.pooled, *self.live)],
            "n": list(self.ns),
            "live_n": list(self.live_ns),
            "against": list(self.against),
            **({"with": list(self.mixed)} if self.mixed else {}),
        }

    def grid(self) -> list[int]:
        """Return every n at which pooled strategies are resampled: ``ns`` and the powers of two below the largest.

        Comparisons at equal tokens interpolate between them.
        """
        return sorted({*self.ns, *(2**power for power in range(self.ns[-1].bit_length()))})


def parse_cases(text: str, *, has_verifier: bool = True) -> tuple[StrategyCase, ...]:
    """Parse strategies separated by commas, each with its parameters: ``NAME:KEY=VALUE:KEY=VALUE``.

    ``all`` stands for every strategy with its defaults, but for those that compare solutions: they need a model that
    follows instructions, as the bundled ones do not. With ``has_verifier`` False, strategies that need a verifier are
    rejected, and ``all`` omits them. Raises ``ValueError``.
    """
    writing = {name: strategy for name, strategy in STRATEGIES.items() if Feature.CANDIDATES not in strategy.supports}
    available = [name for name, strategy in writing.items() if has_verifier or not strategy.needs_verifier]
    every = [StrategyCase(name, name) for name in available if STRATEGIES[name].verifier is not VerifierUse.COMPARISONS]
    cases: dict[str, StrategyCase] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        for case in every if item == "all" else [_parse_case(item)]:
            if case.name not in writing:
                raise ValueError(f"strategy {case.name!r} ranks given solutions: measure it by --candidates")
            if case.name not in available:
                raise ValueError(
                    f"strategy {case.name!r} needs a verifier, and there is none here: set REASONER_PRM, or choose "
                    f"from {', '.join(available)}"
                )
            cases[case.label] = case
    if not cases:
        raise ValueError(f"no strategy is named; known are all, {', '.join(STRATEGIES)}")
    return tuple(cases.values())


def _parse_case(item: str) -> StrategyCase:
    name, *settings = item.split(":")
    params: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"{item!r}: {setting!r} is not KEY=VALUE; write {name}:KEY=VALUE:KEY=VALUE")
        try:
            params[key] = json.loads(value)
        except ValueError:
            params[key] = value
    confidence = None
    if name in STRATEGIES and Feature.EARLY_STOP in STRATEGIES[name].supports:
        confidence = params.pop("confidence", None)
    if confidence is not None and not (isinstance(confidence, int | float) and 0 <= confidence <= 1):
        raise ValueError(f"{item!r}: confidence {confidence!r} must be a number from 0 to 1")
    parse_params(name, params)
    return StrategyCase(item, name, tuple(params.items()), confidence)


def split_pooled_and_live(
    cases: Sequence[StrategyCase], *, has_several_models: bool = False
) -> tuple[tuple[StrategyCase, ...], tuple[StrategyCase, ...]]:
    """Return the cases that decide on a pool of samples, and those that run live. A pool is of one model.

    Raises ``ValueError`` for a strategy that cannot sample from several models.
    """
    if has_several_models:
        able = [name for name, strategy in STRATEGIES.items() if Feature.SEVERAL_MODELS in strategy.supports]
        for case in cases:
            if case.name not in able:
                raise ValueError(f"strategy {case.name!r} samples from one model: use one of {', '.join(able)}")
        return (), tuple(cases)

    def decides_on_samples(case: StrategyCase) -> bool:
        params = dict(case.params)
        return case.name in POOLED or (case.name == DEEPCONF and "top" not in params and params.get("mode") != "online")

    pooled = tuple(case for case in cases if case.takes_n and decides_on_samples(case))
    return pooled, tuple(case for case in cases if case not in pooled)


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse numbers from 1 to ``MAX_N``, separated by commas; sorted. Raises ``ValueError``."""
    counts = sorted({int(item) if item.strip().isdecimal() else 0 for item in text.split(",")})
    if counts[0] < 1 or counts[-1] > MAX_N:
        raise ValueError(f"{text!r}: give numbers from 1 to {MAX_N}, separated by commas")
    return tuple(counts)
