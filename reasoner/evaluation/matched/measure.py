"""Run a matched plan: greedy decoding, the pool of each seed, then every live strategy at each budget.

The pool comes first, since it says how many solutions a budget pays for: that number is the n of the live strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reasoner.answers.equivalence import Equivalence
from reasoner.budget.prices import MONEY_UNITS
from reasoner.budget.usage import Usage
from reasoner.evaluation.matched.plan import MatchedPlan, Quantity
from reasoner.evaluation.matched.replay import SCORED_CEILING, AllRates, BudgetedPool, spend_budgets
from reasoner.evaluation.measure import Advance, EvaluationContext, create_spec, measure_stage, run_live
from reasoner.evaluation.plan import BEST_OF_N, CEILING, DEEPCONF, MAJORITY, Stage, StrategyCase
from reasoner.evaluation.pool import SamplePool, decide
from reasoner.evaluation.runs import Run, RunFile, collect_runs
from reasoner.evaluation.suites.problem import Problem
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import open_search
from reasoner.search.search import Search
from reasoner.strategies.base import VerifierUse
from reasoner.strategies.registry import STRATEGIES, parse_params
from reasoner.subprocess_pool import keep_workers_alive
from reasoner.tree import Node

FIRST_SAMPLES = 8
"""Number of samples of a pool that are drawn before its size is estimated."""
NUM_TRIED = 4
"""Number of problems on which one sample is drawn, to see whether the smallest budget pays for it."""


class BudgetTooSmall(ValueError):
    """The smallest budget does not pay for one sample of a problem; the message says what would."""


@dataclass(frozen=True, slots=True)
class MatchedContext:
    """The setting of an evaluation, and the plan that matches budgets."""

    setting: EvaluationContext
    plan: MatchedPlan

    def uses_scores(self, case: StrategyCase) -> bool:
        """Return True if a case asks the verifier for scores."""
        verifier = self.setting.verifier
        use = STRATEGIES[case.name].verifier_use(parse_params(case.name, dict(case.params)))
        is_welcome = use is VerifierUse.OPTIONAL and verifier is not None and verifier.can_score()
        return use.needs_scores or is_welcome

    @property
    def is_scored(self) -> bool:
        """True if any case uses scores, so that the samples of the pool get some."""
        return any(map(self.uses_scores, self.plan.cases))


async def evaluate_matched(context: MatchedContext, file: RunFile, advance: Advance) -> None:
    """Add every missing item of the plan to the file. Raises the engine's errors; the same call then resumes.

    Raises ``BudgetTooSmall`` before the first item.
    """
    setting, plan = context.setting, context.plan

    async def pool(stage: Stage, problem: Problem, journal: MemoryJournal) -> list[Run]:
        return await measure_pool(context, stage, problem, journal)

    async def live(stage: Stage, problem: Problem, journal: MemoryJournal) -> list[Run]:
        return await run_live(setting, stage, problem, journal)

    with keep_workers_alive():
        if not file.items:
            await check_smallest_budget(context)
        await measure_stage(setting, plan.greedy_stage(), live, file=file, advance=advance)
        for seed in range(plan.seeds):
            await measure_stage(setting, plan.pool_stage(seed), pool, file=file, advance=advance)
        fitting = count_fitting(collect_runs(file.items))
        for seed in range(plan.seeds):
            for case in plan.list_live_cases():
                for budget in plan.budgets:
                    ceiling = SCORED_CEILING if context.uses_scores(case) else CEILING
                    n = choose_n(case, fitting.get((ceiling, budget), 1.0))
                    stage = plan.live_stage(case, budget, seed=seed, n=n)
                    await measure_stage(setting, stage, live, file=file, advance=advance)


def is_incomplete(plan: MatchedPlan, file: RunFile, problems: int) -> bool:
    """Return True if the file lacks any item of the plan."""
    return len(file.done()) < problems * plan.count_stages()


def choose_n(case: StrategyCase, fitting: float) -> int:
    """Return the n of a live case: the solutions that a budget pays for, or its own."""
    return max(1, min(MAX_N, round(fitting))) if case.takes_n else int(dict(case.params).get("n", 1))


def count_fitting(runs: list[Run]) -> Mapping[tuple[str, float], float]:
    """Return the mean number of samples that each budget pays for, by ceiling (without and with scores) and budget."""
    counts: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        if run.budget is not None and run.strategy in (CEILING, SCORED_CEILING):
            counts.setdefault((run.strategy, run.budget), []).append(run.samples)
    return {key: sum(values) / len(values) for key, values in counts.items()}


async def check_smallest_budget(context: MatchedContext) -> None:
    """Raise ``BudgetTooSmall`` if one sample of the first problems costs more than the smallest budget, on average."""
    stage, amounts = context.plan.pool_stage(0), []
    for problem in context.setting.suite.problems[:NUM_TRIED]:
        drawn = await draw_pool(context, stage, problem, MemoryJournal(), most=0.0)
        meter = drawn.rates.choose(drawn.quantity)
        sample = drawn.pool.samples[0]
        amounts.append(meter.compute(1, sample.node.tokens, drawn.pool.usage.verifier_computed))
    least, smallest, quantity = sum(amounts) / len(amounts), context.plan.budgets[0], context.plan.quantity
    if smallest < least:
        with_score = " with its score" if context.is_scored else ""
        raise BudgetTooSmall(
            f"{quantity.write_amount(smallest)} {quantity} do not pay for one sample{with_score}, which takes "
            f"{quantity.write_amount(least)} on the first problems of {context.setting.suite.name}: give at least that"
        )


async def measure_pool(context: MatchedContext, stage: Stage, problem: Problem, journal: MemoryJournal) -> list[Run]:
    """Draw the pool of a problem, and let each pooled case decide on it: at every power of two, and at each budget."""
    plan = context.plan
    if plan.quantity is Quantity.SECONDS:  # the size of the pool depends on the time, which a replay does not repeat
        journal = MemoryJournal()
    drawn = await draw_pool(context, stage, problem, journal, most=plan.budgets[-1])
    sizes = [2**power for power in range(len(drawn.pool.samples).bit_length())]
    equal = Equivalence()
    curves = await decide(
        drawn.pool,
        problem.id,
        seed=stage.seed,
        cases=[(case, sizes) for case in plan.pooled],
        ceiling=sizes,
        equal=equal,
    )
    replayed = [(case, context.uses_scores(case)) for case in plan.replayed]
    spent = await spend_budgets(drawn, problem.id, seed=stage.seed, cases=replayed, budgets=plan.budgets, equal=equal)
    return [*curves, *spent]


async def draw_pool(
    context: MatchedContext, stage: Stage, problem: Problem, journal: MemoryJournal, most: float
) -> BudgetedPool:
    """Draw samples, until generating them has spent ``most``, at least one, and score them if any case uses scores.

    The samples are drawn in batches, and those after the one that reached ``most`` are left out: which samples the pool
    has depends on the samples alone.
    """
    setting, plan = context.setting, context.plan
    sampler = StrategyCase("", BEST_OF_N if context.is_scored else MAJORITY)
    confidence = STRATEGIES[DEEPCONF].params().top if any(case.name == DEEPCONF for case in plan.pooled) else None
    spec = create_spec(setting, stage, problem, sampler)
    async with open_search(spec, setting.engine, journal, prices=setting.prices) as search:
        nodes, size = list[Node](), 1 if most <= 0 else FIRST_SAMPLES
        while len(nodes) < size:
            known = len(nodes)
            async with search.stream() as stream:
                stream.complete([search.root], size - known, confidence=confidence)
                async for _ in stream:
                    pass
            nodes = sorted(search.root.children, key=lambda node: node.path)
            spent = _add_up(context, search, nodes)
            reached = next((count for count, amount in enumerate(spent, 1) if amount >= most), None)
            if reached is not None:
                nodes = nodes[:reached]
                break
            size = min(MAX_N, max(size + 1, round(size * most / spent[-1] * 1.05))) if len(nodes) > known else known
        sampled, num_samples = search.ledger.usage, len(search.root.children)
        if context.is_scored:
            await search.score([node for node in nodes if node.answer is not None])
        right = {node: await setting.check(problem, node.answer) for node in nodes}
        parameters = (setting.models[stage.model].parameters, setting.count_verifier_parameters(sampler.name))
        pool = SamplePool.of(search, right, parameters)
        rates = _find_rates(context, search, sampled, num_samples)
        return BudgetedPool(pool, rates, plan.quantity, search.max_new_tokens(search.root))


def _find_rates(context: MatchedContext, search: Search, sampled: Usage, num_samples: int) -> AllRates:
    """Return what the samples of a pool cost; ``sampled`` is the usage before they were scored."""
    rate = search.ledger.rate_of_model(search.policy)
    verifier = context.setting.count_verifier_parameters(BEST_OF_N) if context.is_scored else 0
    return AllRates.of(
        before=sampled,
        after=search.ledger.usage,
        samples=num_samples,
        question=len(search.root.prefix),
        flops=(float(rate.flops), 2.0 * verifier),
        prices=(rate.prompt / MONEY_UNITS, rate.generated / MONEY_UNITS),
    )


def _add_up(context: MatchedContext, search: Search, nodes: list[Node]) -> list[float]:
    """Return the amount of the first samples, for each number of them."""
    rates = _find_rates(context, search, search.ledger.usage, len(nodes)).choose(context.plan.quantity)
    amounts, tokens = [], 0
    for count, node in enumerate(nodes, 1):
        tokens += node.tokens - node.output_tokens
        amounts.append(rates.compute(count, tokens, 0.0))
    return amounts
