"""What an evaluation runs: which strategies with which parameters, at which n, with which seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reasoner.strategies.registry import STRATEGIES, parse_params

MAJORITY = "self_consistency"
"""The strategy that all others are compared with at equal tokens."""
GREEDY = "greedy"
BEST_OF_N = "best_of_n"
CEILING = "pass@n"
"""The chance that one of n samples is right: no choice among them can do better."""
POOL = "pool"
POOLED = frozenset({"self_consistency", "best_of_n", "weighted_vote"})
"""Strategies that ask for nothing but n independent samples and their scores."""
DEEPCONF = "deepconf"
"""One of them when it judges finished solutions, by the default number of likeliest tokens."""


@dataclass(frozen=True, slots=True)
class StrategyCase:
    """A strategy with parameters, as the command line names it: ``self_consistency:stop=beta:threshold=0.9``."""

    label: str
    name: str
    params: tuple[tuple[str, Any], ...] = ()
    confidence: float | None = None
    """The job's, for strategies that stop by it: written like a parameter, ``auto:confidence=0.9``."""

    @property
    def scales(self) -> bool:
        """Whether it takes n samples and leaves n to the evaluation."""
        return "n" in STRATEGIES[self.name].params.model_fields and "n" not in dict(self.params)

    def counts(self, ns: Sequence[int]) -> Sequence[int]:
        """At which n it runs: at those, or at its own."""
        return ns if self.scales else (dict(self.params).get("n", 1),)

    def spec(self, n: int) -> dict[str, Any]:
        """The job's ``strategy``."""
        return {"name": self.name, **dict(self.params), **({"n": n} if self.scales else {})}


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass over the problems with one seed: a pool of samples, or one live search at one n."""

    name: str
    model: str
    seed: int
    case: StrategyCase | None
    """``None``: the pool."""
    n: int


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """``pooled`` decide on one pool of samples that is drawn at the largest of ``ns``; ``live`` run at each of
    ``live_ns``. Models in ``against`` answer greedily, as the bar that a smaller model's search is held against."""

    model: str
    pooled: tuple[StrategyCase, ...]
    live: tuple[StrategyCase, ...]
    ns: tuple[int, ...]
    live_ns: tuple[int, ...]
    seeds: int = 1
    against: tuple[str, ...] = ()

    def stages(self) -> list[Stage]:
        """In the order in which they run. Greedy decoding has no noise: one seed is all of them."""
        stages: list[Stage] = []
        for case in (case for case in self.live if case.name == GREEDY):
            stages.append(Stage(case.label, self.model, 0, case, 1))
        stages += [Stage(f"{GREEDY} {model}", model, 0, StrategyCase(GREEDY, GREEDY), 1) for model in self.against]
        for seed in range(self.seeds):
            if self.pooled:
                stages.append(Stage(POOL, self.model, seed, None, self.ns[-1]))
            for case in (case for case in self.live if case.name != GREEDY):
                for n in case.counts(self.live_ns):
                    stages.append(
                        Stage(f"{case.label} n={n}" if case.scales else case.label, self.model, seed, case, n)
                    )
        return stages

    def document(self) -> dict[str, Any]:
        """Everything that decides what is run, as JSON."""
        return {
            "strategies": [case.label for case in (*self.pooled, *self.live)],
            "n": list(self.ns),
            "live_n": list(self.live_ns),
            "against": list(self.against),
        }

    def grid(self) -> list[int]:
        """Every n at which pooled strategies are resampled: the ones asked for, and powers of two between them, so that
        a comparison at equal tokens interpolates over short gaps."""
        return sorted({*self.ns, *(2**power for power in range(self.ns[-1].bit_length()))})


def parse_cases(text: str, *, verifies: bool = True) -> tuple[StrategyCase, ...]:
    """Strategies separated by commas, each with its parameters: ``NAME:KEY=VALUE:KEY=VALUE``; ``all`` names every
    strategy with its defaults. Raises ValueError that says what would be right. Without a verifier (``verifies``) those
    that need one are refused, and ``all`` leaves them out."""
    possible = [name for name, strategy in STRATEGIES.items() if verifies or not strategy.needs_verifier]
    cases: dict[str, StrategyCase] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        for case in [StrategyCase(name, name) for name in possible] if item == "all" else [_case(item)]:
            if case.name not in possible:
                raise ValueError(
                    f"strategy {case.name!r} needs a verifier, and there is none here: set REASONER_PRM, or choose "
                    f"from {', '.join(possible)}"
                )
            cases[case.label] = case
    if not cases:
        raise ValueError(f"no strategy is named; known are all, {', '.join(STRATEGIES)}")
    return tuple(cases.values())


def _case(item: str) -> StrategyCase:
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
    if name in STRATEGIES and STRATEGIES[name].stops_when_sure:
        confidence = params.pop("confidence", None)
    if confidence is not None and not (isinstance(confidence, int | float) and 0 <= confidence <= 1):
        raise ValueError(f"{item!r}: confidence {confidence!r} must be a number from 0 to 1")
    parse_params(name, params)
    return StrategyCase(item, name, tuple(params.items()), confidence)


def split_pooled_and_live(cases: Sequence[StrategyCase]) -> tuple[tuple[StrategyCase, ...], tuple[StrategyCase, ...]]:
    """The cases that decide on a pool of samples, and those that run live."""
    pooled = tuple(case for case in cases if case.scales and _decides_on_samples(case))
    return pooled, tuple(case for case in cases if case not in pooled)


def _decides_on_samples(case: StrategyCase) -> bool:
    asked = dict(case.params)
    return case.name in POOLED or (case.name == DEEPCONF and "top" not in asked and asked.get("mode") != "online")


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers from 1 to 256, separated by commas, sorted. Raises ValueError."""
    try:
        counts: Sequence[int] = sorted({int(item) for item in text.split(",")})
    except ValueError:
        counts = ()
    if not counts or counts[0] < 1 or counts[-1] > 256:
        raise ValueError(f"{text!r}: numbers from 1 to 256, separated by commas")
    return tuple(counts)
