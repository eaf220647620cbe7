"""Run a plan on the problems of a suite, item by item, and resume where an earlier run stopped.

The engine's cache is cleared before each stage, so that no case profits from another. If the engine is unavailable or
busy, the request is retried and the job resumes from its journal: an engine failure never counts as a wrong answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType

from engine.protocol.types import EngineClient, EngineUnavailable, InvalidRequest, ModelInfo, list_answering
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.resolve import resolve_program_job
from reasoner.answers.equivalence import Equivalence
from reasoner.base_model import VerifierSpec
from reasoner.budget.prices import Prices
from reasoner.confidence.calibration import Calibration
from reasoner.evaluation.plan import BEST_OF_N, DEEPCONF, GREEDY, MAJORITY, EvaluationPlan, Stage, StrategyCase
from reasoner.evaluation.pool import SamplePool, decide
from reasoner.evaluation.runs import FinishedItem, Run, RunFile
from reasoner.evaluation.suites.files.code_tests import require_sandbox
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.suite import Suite
from reasoner.evaluation.unpinned_engine import UnpinnedEngine
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.request import JobRequest
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.tool_specs import PythonTool
from reasoner.jobs.verifier_specs import LanguageModelVerifier, PairwiseVerifier
from reasoner.jobs.view import fold_events
from reasoner.run import open_search, run_job
from reasoner.strategies.base import VerifierUse
from reasoner.strategies.registry import STRATEGIES
from reasoner.subprocess_pool import keep_workers_alive

RETRY_DELAYS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Delays between attempts at an item while the engine is unavailable or busy."""

Advance = Callable[[Stage, int, int], None]
"""Progress callback with arguments (stage, problems done, problems)."""
Measure = Callable[[Stage, Problem, MemoryJournal], Awaitable[list[Run]]]
"""Function that returns the runs of one problem at one stage; called again with the same journal, it continues."""


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """Everything that the items of an evaluation share."""

    suite: Suite
    plan: EvaluationPlan
    engine: EngineClient
    models: dict[str, ModelInfo]
    verifier: VerifierSpec | None
    sampling: Sampling
    concurrency: int
    calibration: Calibration | None
    """Calibration for ``auto``; ``None`` for the bundled one."""
    defaults: Mapping[str, ModelDefaults]
    """Defaults by model, as in a service: prompts, sampling, stop strings."""
    tools: Sequence[PythonTool] = ()
    """Tools that the models may use."""
    prices: Mapping[str, Prices] = field(default_factory=dict)
    """Prices by model."""

    @classmethod
    async def of(
        cls,
        suite: Suite,
        plan: EvaluationPlan,
        engine: EngineClient,
        verifier: VerifierSpec | None,
        sampling: Sampling,
        concurrency: int,
        calibration: Calibration | None = None,
        defaults: Mapping[str, ModelDefaults] = MappingProxyType({}),
        tools: Sequence[PythonTool] = (),
        prices: Mapping[str, Prices] = MappingProxyType({}),
    ) -> EvaluationContext:
        """Create with the engine's models. Raises ``InvalidRequest`` if it does not serve a model of the plan,
        and if the suite runs answers where there is no sandbox.
        """
        if suite.runs_code:
            await require_sandbox()
        engine = UnpinnedEngine(engine)
        models = {info.id: info for info in await list_answering(engine)}
        strategies = [STRATEGIES[case.name] for case in (*plan.pooled, *plan.live)]
        compares = verifier is not None and verifier.compares
        uses = {strategy.verifier for strategy in strategies}
        scores = verifier is not None and verifier.can_score()
        needed = (compares and VerifierUse.COMPARISONS in uses) or (
            scores and any(each.needs_verifier for each in strategies)
        )
        scorer = getattr(verifier, "model", None)
        for name in (plan.model, *plan.against, *plan.mixed, *([scorer] if needed and scorer is not None else [])):
            if name not in models:
                raise InvalidRequest(f"model {name!r} is not served; served are {', '.join(models)}", "model")
        is_served = scorer is None or scorer in models
        is_welcome = scores and VerifierUse.OPTIONAL in uses
        is_used = is_served and (needed or is_welcome)
        used = verifier if is_used else None
        return cls(
            suite=suite,
            plan=plan,
            engine=engine,
            models=models,
            verifier=used,
            sampling=sampling,
            concurrency=concurrency,
            calibration=calibration,
            defaults=defaults,
            tools=tools,
            prices=prices,
        )

    def choose_verifier(self, strategy: str) -> VerifierSpec | None:
        """Return the verifier that a strategy uses: one that compares, or one that scores."""
        if STRATEGIES[strategy].verifier is not VerifierUse.COMPARISONS:
            return None if self.verifier is None or not self.verifier.can_score() else self.verifier
        return self.verifier if self.verifier is not None and self.verifier.compares else PairwiseVerifier()

    def count_verifier_parameters(self, strategy: str) -> int:
        """Return the number of weights of the model of a strategy's verifier."""
        verifier = self.choose_verifier(strategy)
        model = getattr(verifier, "model", None)
        if model is None and isinstance(verifier, LanguageModelVerifier):
            model = self.plan.model
        return 0 if model is None else self.models[model].parameters

    async def check(self, problem: Problem, answer: str | None) -> bool:
        return await self.suite.check(problem, answer, Equivalence())


def is_incomplete(suite: Suite, plan: EvaluationPlan, file: RunFile) -> bool:
    """Return True if the file lacks any item of the plan."""
    done = file.done()
    return any(
        (stage.name, stage.seed, problem.id) not in done for stage in plan.stages() for problem in suite.problems
    )


async def evaluate(setting: EvaluationContext, file: RunFile, advance: Advance) -> None:
    """Add every missing item of the plan to the file. Raises the engine's errors; the same call then resumes."""

    async def measure(stage: Stage, problem: Problem, journal: MemoryJournal) -> list[Run]:
        return await (_run_pool if stage.case is None else run_live)(setting, stage, problem, journal)

    with keep_workers_alive():
        for stage in setting.plan.stages():
            await measure_stage(setting, stage, measure, file=file, advance=advance)


async def measure_stage(
    setting: EvaluationContext, stage: Stage, measure: Measure, file: RunFile, advance: Advance
) -> None:
    """Add the items of a stage that the file lacks, several at a time. Raises the engine's errors."""
    problems, done = setting.suite.problems, file.done()
    todo = [problem for problem in problems if (stage.name, stage.seed, problem.id) not in done]
    total, count = len(problems), len(problems) - len(todo)
    advance(stage, count, total)
    if not todo:
        return
    await setting.engine.clear_cache()
    remaining = iter(todo)

    async def work() -> None:
        nonlocal count
        for problem in remaining:
            file.add(await _measure_problem(stage, problem, measure))
            count += 1
            advance(stage, count, total)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(setting.concurrency, len(todo))):
                group.create_task(work())
    except* Exception as errors:
        raise errors.exceptions[0] from None


async def _measure_problem(stage: Stage, problem: Problem, measure: Measure) -> FinishedItem:
    journal = MemoryJournal()
    for pause in (*RETRY_DELAYS_SECONDS, None):
        try:
            runs = await measure(stage, problem, journal)
        except EngineUnavailable:
            if pause is None:
                raise
            await asyncio.sleep(pause)
        except InvalidRequest as error:
            if error.field != "problem":
                raise
            return FinishedItem(stage.name, stage.seed, problem.id, failed=str(error))
        else:
            return FinishedItem(stage.name, stage.seed, problem.id, tuple(runs))
    raise AssertionError("the last attempt returns or raises")


async def run_live(setting: EvaluationContext, stage: Stage, problem: Problem, journal: MemoryJournal) -> list[Run]:
    """Run the job of a live stage on a problem, and return its one run."""
    assert stage.case is not None
    spec = create_spec(setting, stage, problem, stage.case)
    outcome = await run_job(spec, setting.engine, journal, prices=setting.prices, calibration=setting.calibration)
    nodes = fold_events(journal.entries).nodes.values()
    answers = [node.answer for node in nodes if node.end_reason not in (None, "step", "said")]
    usage, answer = outcome.usage, outcome.result.answer
    correct, level = await setting.check(problem, answer), outcome.result.answer_level
    verifier_parameters = setting.count_verifier_parameters(stage.case.name)
    bills = {stage.model: usage} if not setting.plan.mixed else outcome.result.usage_by_model
    policy_flops = sum(
        2.0 * setting.models[name].parameters * (bill.prompt - bill.cached + bill.generated)
        for name, bill in bills.items()
    )
    return [
        Run(
            model=stage.model,
            strategy=stage.case.label,
            n=stage.n,
            seed=stage.seed,
            problem=problem.id,
            correct=float(correct),
            reached=float(any([await setting.check(problem, stated) for stated in {*answers, answer}])),
            answered=float(answer is not None),
            samples=float(len(answers)),
            tokens=float(usage.generated),
            thought_tokens=float(usage.thought),
            verifier_tokens=float(usage.verifier_computed),
            flops=policy_flops + 2.0 * verifier_parameters * usage.verifier_computed,
            seconds=usage.seconds,
            correct_strict=float(correct and level == "strict"),
            flexible=float(level == "flexible"),
            cost=usage.cost,
            budget=None if stage.budget is None else stage.budget.amount,
        )
    ]


async def _run_pool(setting: EvaluationContext, stage: Stage, problem: Problem, journal: MemoryJournal) -> list[Run]:
    plan = setting.plan
    scored = any(STRATEGIES[case.name].needs_verifier for case in plan.pooled)
    confidence = STRATEGIES[DEEPCONF].params().top if any(case.name == DEEPCONF for case in plan.pooled) else None
    sampler = StrategyCase("", BEST_OF_N if scored else MAJORITY)
    async with open_search(create_spec(setting, stage, problem, sampler), setting.engine, journal) as search:
        async with search.stream() as stream:
            stream.complete([search.root], stage.n, confidence=confidence)
            async for _ in stream:
                pass
        if scored:
            await search.score([node for node in search.root.children if node.answer is not None])
        right = {node: await setting.check(problem, node.answer) for node in search.root.children}
        parameters = (setting.models[stage.model].parameters, setting.count_verifier_parameters(sampler.name))
        pool = SamplePool.of(search, right, parameters)
    cases = [(case, plan.grid() if case.label == MAJORITY else plan.ns) for case in plan.pooled]
    if not any(case.label == MAJORITY for case in plan.pooled):
        cases.append((StrategyCase(MAJORITY, MAJORITY), plan.grid()))
    return await decide(pool, problem.id, seed=stage.seed, cases=cases, ceiling=plan.grid(), equal=Equivalence())


def create_spec(setting: EvaluationContext, stage: Stage, problem: Problem, case: StrategyCase) -> JobSpec:
    """Return the job of a strategy on a problem at a stage, with the stage's budget if it has one."""
    models = (stage.model, *(setting.plan.mixed if case.name != GREEDY else ()))
    noise = blake2b(f"{stage.seed}/{problem.id}".encode(), digest_size=8)
    request = JobRequest.model_validate(
        {
            **problem.to_job_fields(),
            "model": stage.model,
            "models": [{"model": name} for name in models] if len(models) > 1 else None,
            "strategy": case.to_spec(stage.n),
            "verifier": setting.choose_verifier(case.name),
            "sampling": setting.sampling,
            "answer": setting.suite.answer_spec,
            "tools": [*setting.tools, *problem.tools],
            "confidence": case.confidence,
            "budget": {} if stage.budget is None else {stage.budget.quantity: stage.budget.amount},
            "seed": int.from_bytes(noise.digest(), "big") >> 1,
        }
    )
    return resolve_program_job(request, setting.defaults)
