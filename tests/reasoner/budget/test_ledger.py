"""Budgets in tokens, FLOPs and money are never exceeded, for any search, cache state and price."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import (
    Completion,
    Delta,
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
)
from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import NO_AMOUNT, Amount, Prices, TokenRate, check_budget
from reasoner.budget.spec import Budget
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.registry import STRATEGIES
from tests.scripted import ScriptedEngine, is_verdict
from tests.specs import build_spec
from tests.strategies import WRITING

POLICY, PRM = 700, 1300
"""Number of weights of each model."""


@dataclass
class Bill:
    """Spent and remaining amounts, computed by the test itself in exact arithmetic."""

    flops: int = 0
    money: Fraction = Fraction(0)
    most_flops: int = 0
    most_money: Fraction = Fraction(0)

    def add(self, flops: int, money: Fraction) -> None:
        self.flops += flops
        self.money += money
        self.most_flops = max(self.most_flops, self.flops)
        self.most_money = max(self.most_money, self.money)


class Watching(ScriptedEngine):
    """Engine that sums the upper bounds of requests in flight and the actual usage of finished ones."""

    def __init__(self, prices: dict[str, Prices], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.bill = Bill()
        self.prices = prices

    async def models(self) -> list[ModelInfo]:
        policy, prm = await super().models()
        return [replace(policy, parameters=POLICY), replace(prm, parameters=PRM)]

    def price(self, model: str, kind: str) -> Fraction:
        return Fraction(str(getattr(self.prices.get(model, Prices()), kind))) / 10**6

    def verifier_price(self) -> Fraction:
        """Return the price of a token that the policy reads for a verdict: without one of its own that of a prompt."""
        return self.price("policy", "prompt" if self.prices.get("policy", Prices()).verifier is None else "verifier")

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[Completion | Delta]:
        read, cached, written = (self.price("policy", kind) for kind in ("prompt", "cached", "generated"))
        dearest = written
        if is_verdict(request):
            read, cached = self.verifier_price(), Fraction(0)
            dearest = max(read, written)
        bounds = []
        for branch in request.branches:
            sent = len(request.prompt) + len(branch.generated)
            bound = (2 * POLICY * (sent + branch.max_tokens), max(read, cached) * sent + dearest * branch.max_tokens)
            bounds.append(bound)
            self.bill.add(*bound)
        async for item in super().generate(request, stream=stream):
            assert isinstance(item, Completion)
            flops, money = bounds[item.index]
            fresh, new = item.prompt_tokens - item.cached_tokens, len(item.token_ids)
            wrong = item.drafted_tokens - item.accepted_tokens
            took = read * fresh + cached * item.cached_tokens + written * new
            self.bill.add(2 * POLICY * (fresh + new + wrong) - flops, took - money)
            yield item

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        price, bound = self.price("prm", "verifier"), request.max_compute
        if bound is not None:
            self.bill.add(2 * PRM * bound * len(request.items), price * bound * len(request.items))
        results = await super().score(request)
        for result in results:
            took = 0 if result.values is None else result.computed_tokens
            self.bill.add(2 * PRM * (took - (bound or 0)), price * (took - (bound or 0)))
        return results


def job(strategy: str, seed: int, **budget: float) -> JobSpec:
    params = {} if strategy in ("greedy", "budget_forcing") else {"n": 8}
    known = STRATEGIES[strategy].params.model_fields
    return build_spec(
        {
            "problem": "how?",
            "seed": seed,
            "strategy": {"name": strategy, **{name: value for name, value in params.items() if name in known}},
            "budget": budget,
        }
    )


per_million = st.integers(0, 5_000_000).map(lambda millionths: millionths / 1e6)
price_lists = st.builds(Prices, prompt=per_million, cached=per_million, generated=per_million, verifier=per_million)
limits = st.fixed_dictionaries(
    {},
    optional={
        "tokens": st.integers(1, 2500),
        "flops": st.integers(4 * POLICY, 4_000_000),
        "cost": st.integers(10, 8000).map(lambda millionths: millionths / 1e6),
    },
)


async def run(spec: JobSpec, engine: Watching, journal: MemoryJournal | None = None) -> JobOutcome:
    return await run_job(spec, engine, journal or MemoryJournal(), prices=engine.prices)


@given(
    strategy=st.sampled_from(WRITING),
    seed=st.integers(0, 1000),
    budget=limits,
    policy=price_lists,
    prm=price_lists,
    order=st.integers(0, 1000),
    warm=st.booleans(),
    guesses=st.booleans(),
    held=st.sampled_from([0.0, 0.5, 1.0]),
)
async def test_no_search_can_exceed_any_of_its_limits(
    strategy: str,
    seed: int,
    budget: dict[str, float],
    policy: Prices,
    prm: Prices,
    order: int,
    warm: bool,
    guesses: bool,
    held: float,
) -> None:
    engine = Watching({"policy": policy, "prm": prm}, order=order, warm=warm, guesses=guesses, held=held)
    spec = job(strategy, seed, **budget)
    try:
        check_budget(spec.budget, "policy", (await engine.models())[0], engine.prices)
    except InvalidRequest:
        with pytest.raises(InvalidRequest):
            await run(spec, engine)
        return
    usage = (await run(spec, engine)).usage
    assert usage.total == engine.total <= budget.get("tokens", engine.total)
    assert usage.flops == engine.bill.flops
    assert round(Fraction(usage.cost), 12) == round(engine.bill.money, 12)
    if "flops" in budget:
        assert engine.bill.most_flops <= budget["flops"]
        assert usage.drafted == 0
    if "cost" in budget:
        assert engine.bill.most_money <= Fraction(str(budget["cost"]))


@given(
    strategy=st.sampled_from(WRITING),
    seed=st.integers(0, 1000),
    budget=limits,
    die_after=st.integers(0, 30),
    order=st.integers(0, 1000),
)
async def test_a_crashed_and_resumed_job_keeps_all_limits_and_its_replay_has_the_same_bill(
    strategy: str, seed: int, budget: dict[str, float], die_after: int, order: int
) -> None:
    prices = {"policy": Prices(prompt=0.25, cached=0.05, generated=1.5), "prm": Prices(verifier=0.125)}
    budget |= {"flops": budget.get("flops", 3_000_000), "cost": max(budget.get("cost", 0.0), 5e-6)}
    spec, journal = job(strategy, seed, **budget), MemoryJournal()
    with contextlib.suppress(EngineUnavailable):
        await run(spec, Watching(prices, order=order, die_after=die_after), journal)
    outcome = await run(spec, Watching(prices, order=order + 1, held=0.5), journal)
    assert outcome.usage.flops <= budget["flops"]
    assert round(outcome.usage.cost, 12) <= budget["cost"]
    idle = Watching({}, order=order)
    again = await run_job(spec, idle, MemoryJournal(journal.entries), prices=prices)
    assert (again.result, again.usage) == (outcome.result, outcome.usage)
    assert idle.total == 0


amounts = st.builds(Amount, st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))


@given(
    limits=st.tuples(*[st.one_of(st.none(), st.integers(1, 100))] * 3),
    moves=st.lists(st.tuples(st.sampled_from(["settle", "release"]), amounts, st.floats(0, 1)), max_size=30),
)
def test_a_ledger_reserves_what_is_left_and_gets_back_what_is_unused(
    limits: tuple[int | None, int | None, int | None], moves: list[tuple[str, Amount, float]]
) -> None:
    tokens, flops, money = limits
    ledger = Ledger(Budget(tokens=tokens, flops=flops, cost=None if money is None else money * 1e-12))
    spent = Amount()
    for move, amount, part in moves:
        fits = all(
            limit is None or gone + more <= limit for limit, gone, more in zip(limits, spent, amount, strict=True)
        )
        assert (ledger.max_affordable(amount) >= 1) == fits or amount == NO_AMOUNT
        if not fits:
            with pytest.raises(ValueError, match="cannot reserve"):
                ledger.reserve(amount)
            continue
        ledger.reserve(amount)
        if move == "release":
            ledger.release(amount)
        else:
            took = Amount(*(int(part * each) for each in amount))
            spend = Usage(generated=took.tokens, flops=took.flops, cost=took.money * 1e-12)
            ledger.commit(amount, spend)
            spent += took
        assert Amount.from_usage(ledger.usage) == spent


def test_at_most_half_of_a_limit_is_set_aside_and_only_whole_requests_may_use_it() -> None:
    ledger = Ledger(Budget(tokens=100, flops=1000))
    ledger.reserve_for_answer(*[Amount(tokens=30, flops=800)] * 2)
    assert ledger.max_affordable(Amount(tokens=1)) == 70
    assert ledger.max_affordable(Amount(flops=1)) == 500
    assert ledger.max_affordable(Amount(tokens=1), may_use_answer_reserve=True) == 100
    ledger.reserve_for_answer(*[Amount(tokens=80)] * 2)
    assert ledger.max_affordable(Amount(tokens=1)) == 50
    ledger.release_answer_reserve()
    assert ledger.max_affordable(Amount(tokens=1)) == 100


def test_a_branchs_expected_cost_is_set_aside_but_at_least_a_quarter_of_a_limit() -> None:
    ledger = Ledger(Budget(tokens=100))
    for likely, kept in ((5, 25), (40, 40), (90, 50)):
        ledger.reserve_for_answer(Amount(tokens=500), Amount(tokens=likely))
        assert ledger.max_affordable(Amount(tokens=1)) == 100 - kept
    ledger.reserve_for_answer(Amount(tokens=10), Amount(tokens=10))
    assert ledger.max_affordable(Amount(tokens=1)) == 90


def test_the_second_half_of_the_time_is_set_aside() -> None:
    now = 0.0
    ledger = Ledger(Budget(seconds=10), clock=lambda: now)
    ledger.reserve_for_answer(NO_AMOUNT, NO_AMOUNT)
    assert ledger.max_affordable(Amount(tokens=1)) > 0
    now = 6.0
    assert ledger.max_affordable(Amount(tokens=1)) == 0
    assert ledger.max_affordable(Amount(tokens=1), may_use_answer_reserve=True) > 0
    ledger.release_answer_reserve()
    assert ledger.max_affordable(Amount(tokens=1)) > 0


@pytest.mark.parametrize(
    ("seconds", "before_deadline", "expected"), [(None, 30.0, 20.0), (100.0, 30.0, 20.0), (15.0, 30.0, 1.0)]
)
def test_what_is_left_until_the_deadline_bounds_the_time_in_each_attempt(
    seconds: float | None, before_deadline: float, expected: float
) -> None:
    now = 1000.0
    ledger = Ledger(Budget(seconds=seconds), clock=lambda: now, seconds_to_deadline=before_deadline)
    now += 6.0
    ledger.replay(Usage(), 10.0)  # the work of an earlier attempt, before the time that is left began
    now += 4.0
    assert ledger.seconds_left() == expected
    now += 96.0
    assert ledger.seconds_left() == 0.0
    assert ledger.is_exhausted


def test_nothing_is_set_aside_without_a_limit() -> None:
    ledger = Ledger(Budget())
    ledger.reserve_for_answer(*[Amount(tokens=30)] * 2)
    assert not ledger.has_answer_reserve


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_request_that_used_more_than_its_reservation_is_an_error(part: int) -> None:
    ledger = Ledger(Budget(tokens=100, flops=100, cost=100e-12))
    reservation = Amount(10, 10, 10)
    ledger.reserve(reservation)
    more = [10, 10, 10]
    more[part] += 1
    with pytest.raises(ValueError, match="reserved used"):
        ledger.commit(reservation, Usage(generated=more[0], flops=more[1], cost=more[2] * 1e-12))


def test_a_price_is_per_million_tokens() -> None:
    model = ModelInfo("m", "generate", 100, 100, 7_000_000_000)
    rate = TokenRate.of_model(model, {"m": Prices(prompt=3.0, cached=0.3, generated=15.0)})
    bill = rate.branch_usage(prompt=1000, cached=600, generated=200, drafted=50, accepted=20)
    assert bill.cost == pytest.approx((400 * 3.0 + 600 * 0.3 + 200 * 15.0) / 1e6, rel=1e-12)
    assert bill.flops == 2 * 7e9 * (400 + 200 + 30)
    assert TokenRate.of_model(model, {"m": Prices(verifier=2.0)}).verification_usage(500, 900).cost == pytest.approx(
        0.001
    )
    assert TokenRate.of_model(model, {}).branch_usage(1000, 600, 200, 0, 0).cost == 0.0


@pytest.mark.parametrize(
    ("budget", "parameters", "hint"),
    [
        ({"flops": 3999.0}, 1000, "give at least 4000"),
        ({"flops": 1e9}, 0, "does not report the size"),
        ({"cost": 1.0}, 1000, "model 'other' has no prices (models with prices: policy): write [models.other.prices]"),
    ],
)
def test_a_limit_that_cannot_be_enforced_is_refused_with_the_valid_choice(
    budget: dict[str, float], parameters: int, hint: str
) -> None:
    model = ModelInfo("other", "generate", 100, 100, parameters)
    with pytest.raises(InvalidRequest) as refused:
        check_budget(Budget.model_validate(budget), "other", model, {"policy": Prices(generated=1.0)})
    assert hint in str(refused.value)
    assert refused.value.field == f"budget.{next(iter(budget))}"


def test_money_below_the_price_of_a_token_is_refused_even_without_a_replica() -> None:
    prices = {"policy": Prices(prompt=1.0, generated=5.0)}
    check_budget(Budget(cost=6e-6), "policy", None, prices)
    with pytest.raises(InvalidRequest, match="does not pay for one token"):
        check_budget(Budget(cost=4e-6), "policy", None, prices)


async def test_a_tight_budget_leaves_a_part_for_the_verifier() -> None:
    answers = unscored = 0
    for seed in range(40):
        journal = MemoryJournal()
        await run_job(job("weighted_vote", seed, tokens=600), ScriptedEngine(), journal)
        scored = {entry.data["node"] for entry in journal.entries if entry.type == "score"}
        nodes = [entry.data for entry in journal.entries if entry.type == "node" and entry.data["final"]]
        stated = [node["node"] for node in nodes if node["answer"] is not None]
        answers += len(stated)
        unscored += sum(node not in scored for node in stated)
    assert answers > 200
    assert unscored < 0.04 * answers  # twice as many if nothing is set aside
