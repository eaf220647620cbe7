"""Spend a budget on a pool of samples: as many of them as it pays for, in the order in which they were drawn.

A job that samples one solution after another ends with the one that its budget cuts off, which has no vote and is on
the bill. The pool is read the same way, from several places where there is room: each place begins after the sample
that an earlier one cut off, so that all of them are independent jobs with fresh samples (the strong Markov property of
independent samples), and all strategies begin at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from reasoner.answers.equivalence import Equivalence
from reasoner.budget.usage import Usage
from reasoner.evaluation.plan import CEILING, StrategyCase
from reasoner.evaluation.pool import MEASURED, PoolSearch, Sample, SamplePool
from reasoner.evaluation.runs import Run
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.strategies.registry import STRATEGIES, parse_params

MAX_PLACES = 64
"""Maximum number of places of a pool at which a budget is spent."""
SCORED_CEILING = f"{CEILING} scored"
"""Name of the ceiling for choices among the samples that a budget pays for together with their scores."""


@dataclass(frozen=True, slots=True)
class Rates:
    """One quantity as a sum over a job: of its question once, its samples, and the tokens of policy and verifier."""

    question: float = 0.0
    sample: float = 0.0
    token: float = 1.0
    verifier_token: float = 1.0

    def compute(self, samples: float, tokens: float, verifier_tokens: float) -> float:
        """Return the amount of a job; 0 of one without samples."""
        if samples == 0:
            return 0.0
        return self.question + self.sample * samples + self.token * tokens + self.verifier_token * verifier_tokens


@dataclass(frozen=True, slots=True)
class AllRates:
    """The rates of a pool for every quantity: the field names are those of ``Run``."""

    flops: Rates
    cost: Rates
    seconds: Rates

    @classmethod
    def of(
        cls,
        before: Usage,
        after: Usage,
        samples: int,
        question: int,
        flops: tuple[float, float],
        prices: tuple[float, float],
    ) -> AllRates:
        """Create from the usage of a pool before and after its samples were scored.

        ``question``: tokens of the prompt, which are computed once; ``flops`` of a token of the policy and of the
        verifier; ``prices`` of a prompt's and of a generated token of the policy.
        """
        policy, verifier = flops
        prompt, generated = prices
        spent = after.verifier_computed - before.verifier_computed
        prompts = policy * (before.prompt - before.cached - question)
        paid = before.cost - generated * before.generated - prompt * question
        return cls(
            flops=Rates(policy * question, max(0.0, prompts) / samples, policy, verifier_token=verifier),
            cost=Rates(
                prompt * question,
                max(0.0, paid) / samples,
                generated,
                verifier_token=(after.cost - before.cost) / max(1, spent),
            ),
            seconds=Rates(
                token=before.seconds / max(1, before.generated),
                verifier_token=max(0.0, after.seconds - before.seconds) / max(1, spent),
            ),
        )

    def choose(self, quantity: str) -> Rates:
        """Return the rates of a quantity; a token of either model counts one token."""
        return Rates() if quantity == "tokens" else getattr(self, quantity)


@dataclass(frozen=True, slots=True)
class BudgetedPool:
    """A pool with the rates of its quantity, and the longest sample that its model could have drawn, in tokens."""

    pool: SamplePool
    rates: AllRates
    quantity: str
    max_tokens: int

    def count_fitting(self, place: int, budget: float, *, scored: bool) -> int:
        """Return how many samples from ``place`` on a budget pays for, with their scores if need be."""
        rates, samples = self.rates.choose(self.quantity), self.pool.samples[place : place + MAX_N]
        meter = PoolSearch(self.pool, samples, Equivalence())
        tokens = 0
        for count, sample in enumerate(samples):
            tokens += count_generated(sample)
            if scored:
                meter.bill_score(sample)
            if rates.compute(count + 1, tokens, meter.verifier_tokens) > budget:
                return count
        return len(samples)

    def list_places(self, budget: float, most: float) -> list[int]:
        """Return the places at which a budget is spent, in a pool that was drawn until it had spent ``most``.

        Their number does not depend on the samples: so many fit whatever the samples' lengths.
        """
        rates = self.rates.choose(self.quantity)
        longest = budget + rates.compute(1, self.max_tokens, 0.0)
        places, place = [0], 0
        for _ in range(min(MAX_PLACES, int(most // longest)) - 1):
            place += self.count_fitting(place, budget, scored=False) + 1
            if place >= len(self.pool.samples):
                break
            places.append(place)
        return places

    def charge(self, values: dict[str, float]) -> dict[str, float]:
        """Return FLOPs, cost and seconds of a job with these samples and tokens."""
        parts = values["samples"], values["tokens"], values["verifier_tokens"]
        return {field.name: getattr(self.rates, field.name).compute(*parts) for field in fields(self.rates)}


def count_generated(sample: Sample) -> int:
    """Return the tokens of a sample that its model generated."""
    return max(0, sample.node.tokens - sample.node.output_tokens)


async def spend_budgets(
    budgeted: BudgetedPool,
    problem: str,
    seed: int,
    cases: Sequence[tuple[StrategyCase, bool]],
    budgets: Sequence[float],
    equal: Equivalence,
) -> list[Run]:
    """Return the runs of the cases, each with whether it scores its samples, at each budget, and of the ceilings."""
    runs = []
    model = budgeted.pool.spec.model or ""
    for budget in budgets:
        places = budgeted.list_places(budget, budgets[-1])
        for case, scored in cases:
            spent = [await _spend(budgeted, place, budget, case=case, scored=scored, equal=equal) for place in places]
            runs.append(_average(spent, model, case.label, seed=seed, problem=problem, budget=budget))
        for label, scored in ((CEILING, False), (SCORED_CEILING, True)):
            spent = [_reach(budgeted, place, budget, scored=scored) for place in places]
            runs.append(_average(spent, model, label, seed=seed, problem=problem, budget=budget))
    return runs


async def _spend(
    budgeted: BudgetedPool, place: int, budget: float, case: StrategyCase, *, scored: bool, equal: Equivalence
) -> dict[str, float]:
    """Return what a case makes of the samples that a budget pays for."""
    pool = budgeted.pool
    count = budgeted.count_fitting(place, budget, scored=scored)
    search = PoolSearch(pool, pool.samples[place : place + count], equal)
    values = dict.fromkeys(MEASURED, 0.0)
    if count:
        given = {key: value for key, value in case.to_spec(count).items() if key != "name"}
        choice = await STRATEGIES[case.name].run(search, parse_params(case.name, given))
        values = dict(zip(MEASURED, map(float, search.measure(choice.node)), strict=True))
    return _bill(budgeted, values, place + count, budget, is_cut=len(search.begun) == count)


def _reach(budgeted: BudgetedPool, place: int, budget: float, *, scored: bool) -> dict[str, float]:
    """Return what the suite's rule would make of the samples that a budget pays for."""
    count = budgeted.count_fitting(place, budget, scored=scored)
    samples = budgeted.pool.samples[place : place + count]
    right = [sample for sample in samples if sample.right]
    meter = PoolSearch(budgeted.pool, samples, Equivalence())
    for sample in samples if scored else ():
        meter.bill_score(sample)
    values = {
        "correct": float(bool(right)),
        "reached": float(bool(right)),
        "answered": float(any(sample.node.answer is not None for sample in samples)),
        "samples": float(count),
        "tokens": float(sum(map(count_generated, samples))),
        "thought_tokens": float(sum(sample.node.thought_tokens for sample in samples)),
        "verifier_tokens": meter.verifier_tokens,
        "correct_strict": float(any(sample.node.answer_level == "strict" for sample in right)),
        "flexible": 0.0,
    }
    return _bill(budgeted, values, place + count, budget, is_cut=True)


def _bill(
    budgeted: BudgetedPool, values: dict[str, float], following: int, budget: float, *, is_cut: bool
) -> dict[str, float]:
    """Add the sample that the budget cuts off, the next one of the pool, and what all of it costs."""
    rates, samples = budgeted.rates.choose(budgeted.quantity), budgeted.pool.samples
    spent = rates.compute(values["samples"] + 1, values["tokens"], values["verifier_tokens"])
    begun = values["samples"]
    if is_cut and begun < MAX_N and following < len(samples) and spent < budget and rates.token > 0:
        begun += 1
        values["tokens"] += min(count_generated(samples[following]), int((budget - spent) / rates.token))
    return values | budgeted.charge(values | {"samples": begun})


def _average(
    spent: Sequence[dict[str, float]], model: str, strategy: str, seed: int, problem: str, budget: float
) -> Run:
    means = {name: sum(values[name] for values in spent) / len(spent) for name in spent[0]}
    n = max(1, round(means["samples"]))
    return Run(model=model, strategy=strategy, n=n, seed=seed, problem=problem, budget=budget, **means)
