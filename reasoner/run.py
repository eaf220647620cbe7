"""Run one job from its specification to its result, on a given engine and journal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from engine.protocol.types import EngineClient, ModelInfo
from reasoner.admission.check import parse_strategy
from reasoner.admission.policy_checks import check_opened_policy
from reasoner.admission.refusal import JobRefused
from reasoner.alternatives import find_alternatives
from reasoner.answers.equivalence import Equivalence
from reasoner.best_so_far import Logprobs, build_result, choose_best_so_far
from reasoner.best_text import choose_text
from reasoner.budget.ledger import Ledger
from reasoner.budget.prices import Prices, check_budget
from reasoner.budget.usage import Usage
from reasoner.confidence.calibration import Calibration, ModelFingerprint, shipped_calibration
from reasoner.deadline import run_within
from reasoner.jobs.job import FinishReason, JobResult
from reasoner.jobs.journal import JobCancelled, Journal
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.verifier_specs import PrmVerifier, ProbeVerifier
from reasoner.sandbox.cells import CellLimits
from reasoner.sandbox.lockdown import check_lockdown
from reasoner.search.calls.functions import list_functions, open_function_reader
from reasoner.search.calls.runner import CallRunner
from reasoner.search.context import SearchContext
from reasoner.search.policies.availability import find_members, without_members
from reasoner.search.policies.call_format import find_python_format, resolve_python
from reasoner.search.policies.forced_calls import force_calls
from reasoner.search.policies.policy import Policy, tokenize_problem
from reasoner.search.policies.selection import policy_selector, policy_selectors, verifier_selector
from reasoner.search.policies.thoughts import find_own_thoughts
from reasoner.search.policies.tool_messages import find_tool_messages
from reasoner.search.prefix_pin import PrefixPin
from reasoner.search.search import Search
from reasoner.strategies.base import AnswerLeader, Choice, Feature, VerifierUse
from reasoner.strategies.registry import STRATEGIES
from reasoner.tools.calls import CallReader
from reasoner.tools.python import PythonRunner
from reasoner.tree import describe_refusals, find_most_promising, find_refusal
from reasoner.verifiers.context import VerifierContext
from reasoner.verifiers.probe import reads_while_decoding
from reasoner.verifiers.registry import open_comparer, open_scorer

log = logging.getLogger("reasoner.run")


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The end of a job. ``completed`` has a finished solution, ``incomplete`` has none."""

    status: Literal["completed", "incomplete"]
    result: JobResult
    usage: Usage


async def run_job(
    spec: JobSpec,
    engine: EngineClient,
    journal: Journal,
    *,
    cancelled: asyncio.Event | None = None,
    prices: Mapping[str, Prices] | None = None,
    calibration: Calibration | None = None,
    allow_unsandboxed_python: bool = False,
) -> JobOutcome:
    """Search for an answer; ``spec`` names models where several are served. ``prices`` are by model.
    ``calibration``, by default that of the bundled models, is used if it was fitted for the job's models.
    ``allow_unsandboxed_python`` allows Python of clients and models where no sandbox holds it.

    Raises ``JobCancelled`` with the best so far soon after ``cancelled`` is set, ``LeaseLost`` when the journal has
    another owner, ``EngineUnavailable`` when the engine is away (run it again later: the journal holds what is done),
    and ``JobRefused`` and ``InvalidRequest`` for what can never work.
    """
    strategy, params = parse_strategy(spec)
    opened = open_search(
        spec,
        engine,
        journal=journal,
        cancelled=cancelled,
        prices=prices,
        calibration=calibration,
        allow_unsandboxed_python=allow_unsandboxed_python,
    )
    try:
        async with opened as search:
            choice = await strategy.run(search, params)
            is_budget_exhausted = search.is_budget_exhausted
            choice = await choose_text(search, choice)
            others = await find_alternatives(search, choice)
            refused = find_refusal(search.root) if choice.node is None else None
            if refused is not None:
                raise refused
            logprobs = await _compute_logprobs(search, choice, others)
            await search.record_selection(choice.node)
    except JobCancelled as end:
        end.result = choose_best_so_far(spec, await journal.load())
        raise
    return _build_outcome(search, choice, others=others, is_budget_exhausted=is_budget_exhausted, logprobs=logprobs)


@asynccontextmanager
async def open_search(
    spec: JobSpec,
    engine: EngineClient,
    journal: Journal,
    cancelled: asyncio.Event | None = None,
    prices: Mapping[str, Prices] | None = None,
    calibration: Calibration | None = None,
    allow_unsandboxed_python: bool = False,
) -> AsyncIterator[Search]:
    """Open the search that ``run_job`` passes to the strategy, with a verifier if the strategy uses one."""
    strategy, params = parse_strategy(spec)
    async with PrefixPin(engine, journal.job_id) as prefix_pin, Equivalence():  # which keeps child processes for reuse
        served, left_out = await find_members(spec, engine, journal, cancelled or asyncio.Event())
        spec = without_members(spec, left_out)
        policy = policy_selector(spec).find(served.values())
        use = strategy.verifier_use(params)
        needs_verifier = use.needs_scores or (use is VerifierUse.OPTIONAL and _has_verifier(spec, served))
        reads = Feature.EARLY_STOP in strategy.supports and (needs_verifier or use is VerifierUse.OPTIONAL)
        table = _choose_calibration(calibration, spec, policy, served, has_scores=needs_verifier) if reads else None
        table, unknown = _narrow(table, params.calibration_family)
        spec = resolve_python(spec, [selector.find(served.values()) for selector, _ in policy_selectors(spec)])
        policies = await _open_policies(spec, engine, served, prices or {})
        prompt = await tokenize_problem(spec, engine, policy)
        is_shared, is_exact = journal.grant_source is not None, _counts_exactly(spec, policies, served)
        left = None if spec.deadline is None else spec.deadline - time.time()
        ledger = Ledger(
            spec.budget, prices, seconds_to_deadline=left, from_shared_pool=is_shared, counts_exactly=is_exact
        )
        offered = VerifierContext(
            spec,
            engine,
            served=served,
            policy=policy,
            pin_key=prefix_pin.key,
            ledger=ledger,
            equivalence=Equivalence(seconds_left=ledger.seconds_until_cut),
            allow_unsandboxed_python=allow_unsandboxed_python,
            policies=policies if spec.candidates is None else (),
        )
        scorer = await open_scorer(offered) if needs_verifier else None
        comparer = await open_comparer(offered) if use is VerifierUse.COMPARISONS else None
        if scorer is not None and reads_while_decoding(spec.verifier, policy):
            policies = (replace(policies[0], reads_probe=True),)
        models = [policy.model for policy in policies]
        calls = await _open_calls(spec, engine, policies=policies, ledger=ledger, unlocked=allow_unsandboxed_python)
        context = SearchContext(
            spec,
            engine,
            policies=policies,
            prefix_pin=prefix_pin,
            journal=journal,
            ledger=ledger,
            equivalence=offered.equivalence,
            cancelled=cancelled or asyncio.Event(),
            scorer=scorer,
            comparer=comparer,
            verifier=_find_verifier_model(spec, policy, served) if scorer or comparer else None,
            calibration=table,
            calibration_gap=unknown,
            left_out=tuple(left_out),
            functions=open_function_reader(spec, models),
            calls=calls,
            forced_calls=force_calls(spec, models, strategy.constraint_needs),
        )
        search = await Search.begin(context, prompt)
        try:
            yield search
        finally:
            await search.close()


async def _open_policies(
    spec: JobSpec, engine: EngineClient, served: Mapping[str, ModelInfo], prices: Mapping[str, Prices]
) -> tuple[Policy, ...]:
    """Return the job's policies. Raises ``InvalidRequest`` for a job that one of them cannot run."""
    policies = []
    writes = Feature.CANDIDATES not in STRATEGIES[spec.strategy.name].supports
    for index, (selector, weight) in enumerate(policy_selectors(spec)):
        model = selector.find(served.values())
        # Those of a client's candidates are found in their texts.
        thoughts = await find_own_thoughts(spec, engine, model) if writes else None
        check_opened_policy(spec, model, thoughts)
        check_budget(spec.budget, model.id, model, prices)
        wait = 0.0 if spec.models is None else spec.models[index].patience
        sampling = spec.sampling.fill(model.sampling)
        policies.append(Policy(model, sampling, thoughts, weight=weight, wait_seconds=wait))
    return tuple(policies)


async def _open_calls(
    spec: JobSpec, engine: EngineClient, policies: tuple[Policy, ...], ledger: Ledger, unlocked: bool
) -> CallRunner | None:
    """Return the runner of the job's calls. Raises ``InvalidRequest`` where no sandbox holds them."""
    tool = spec.python
    if tool is None:
        return None
    if not unlocked:
        await run_within(ledger.seconds_until_cut(), lambda: check_lockdown("a model's Python", "tools"))
    limits = CellLimits(tool.seconds, tool.memory_mb << 20, tool.output_chars)
    python = PythonRunner(limits, ledger.seconds_until_cut, locked=not unlocked)
    own, variables = find_python_format(spec), spec.template_kwargs
    if own is None:
        return CallRunner(python, engine, policies, tool.calls)
    messages = [await find_tool_messages(engine, policy.model.id, own, variables) for policy in policies]
    return CallRunner(
        python,
        engine,
        policies=policies,
        max_calls=tool.calls,
        reader=CallReader(own, list_functions(spec)),
        messages=messages,
    )


def _find_verifier_model(spec: JobSpec, policy: ModelInfo, served: Mapping[str, ModelInfo]) -> ModelInfo | None:
    """Return the verifier's model; ``None`` if the verifier has none."""
    selector = verifier_selector(spec.verifier)
    if selector is None:
        return None
    fitting = {info.id: info for info in served.values() if selector.fits(info)}
    if selector.name is None:
        return next(iter(fitting.values())) if len(fitting) == 1 else policy
    return fitting.get(selector.name)


def _counts_exactly(spec: JobSpec, policies: Sequence[Policy], served: Mapping[str, ModelInfo]) -> bool:
    """Return True if the tokens of all requests of the job are known before."""
    selector = verifier_selector(spec.verifier)
    verifier = None if selector is None or selector.name is None else served.get(selector.name)
    is_exact = all(policy.model.counts_exactly for policy in policies)
    return is_exact and (verifier is None or verifier.counts_exactly)


def _has_verifier(spec: JobSpec, served: Mapping[str, ModelInfo]) -> bool:
    """Return True if the job's verifier is named, or needs no model, or one that fits is served."""
    if spec.verifier is None:
        return False
    selector = verifier_selector(spec.verifier)
    return selector is None or selector.name is not None or any(selector.fits(info) for info in served.values())


def _choose_calibration(
    given: Calibration | None, spec: JobSpec, policy: ModelInfo, served: Mapping[str, ModelInfo], *, has_scores: bool
) -> Calibration | None:
    """Return the given table, or else the shipped one, if it holds for the models of this job; otherwise log a warning.

    Without scores of a verifier only a given table can hold: the shipped one is for scores.
    """
    if not has_scores:
        return given and _keep_if_fitting(given, given.find_mismatch(ModelFingerprint.of_model(policy), None))
    calibration = given or shipped_calibration()
    verifier, selector = spec.verifier, verifier_selector(spec.verifier)
    wrong: str | None = None
    if isinstance(verifier, PrmVerifier | ProbeVerifier) and selector and verifier.aggregation == "last":
        scores = ModelFingerprint.of_verifier(verifier, selector.find(served.values()))
        wrong = calibration.find_mismatch(ModelFingerprint.of_model(policy), scores)
    else:
        wrong = f"a calibration is fitted for {PrmVerifier()!r} or {ProbeVerifier()!r}, and this job has {verifier!r}"
    return _keep_if_fitting(calibration, wrong)


def _keep_if_fitting(calibration: Calibration, wrong: str | None) -> Calibration | None:
    """Return the table unless something is wrong with it, which is then logged."""
    if wrong is None:
        return calibration
    _warn(f"{wrong}: it is left out, and agreement alone makes sure; 'reasoner calibrate' fits another")
    return None


def _narrow(calibration: Calibration | None, family: str | None) -> tuple[Calibration | None, str | None]:
    """Return the part of the table for a family of tasks, or for questions of any, and why there is none.

    Raises ``JobRefused`` for a family that is named and not in the table.
    """
    if family is not None:
        names = [] if calibration is None else [each.name for each in calibration.families]
        if calibration is None or family not in names:
            known = ", ".join(map(repr, names)) or "no table with families holds for this job's models"
            raise JobRefused("invalid-request", "strategy.family", f"unknown family {family!r}: {known}")
        return calibration.narrow(family), None
    if calibration is not None and len(calibration.families) == 1:
        return calibration.narrow(calibration.families[0].name), None
    weak = [] if calibration is None else calibration.list_weak_families()
    if not weak:
        return calibration, None
    told = "; ".join(f"{each.name}: {each.common}" for each in weak)
    return None, f"what its families have in common is behind all samples ({told}): name the family of the question"


@lru_cache(64)
def _warn(message: str) -> None:
    """Log each message once: it is the same for every job of a service."""
    log.warning(message)


async def _compute_logprobs(search: Search, choice: Choice, others: Sequence[AnswerLeader]) -> Logprobs:
    """Return the log-probabilities of the solutions of a result, by node, if the job asks for them."""
    count, shown = search.spec.logprobs, choice.node or find_most_promising(search.root)
    if count is None or shown is None:
        return {}
    solutions = [shown, *(other.node for other in others)]
    return {node.id: await search.compute_logprobs(node, count) for node in solutions}


def _build_outcome(
    search: Search, choice: Choice, others: Sequence[AnswerLeader], is_budget_exhausted: bool, logprobs: Logprobs
) -> JobOutcome:
    status: Literal["completed", "incomplete"] = "incomplete" if choice.node is None else "completed"
    ended: FinishReason = "no_answer" if choice.node is None or choice.node.answer is None else "answer"
    reason: FinishReason = "budget" if is_budget_exhausted else ended
    note = search.note if choice.node is not None else describe_refusals(search.root) or search.note
    result = build_result(
        search.spec,
        search.root,
        choice=choice,
        finish_reason=reason,
        usage_by_model=search.usage_by_model,
        alternatives=others,
        logprobs=logprobs,
        note=note,
    )
    return JobOutcome(status, result, search.ledger.usage)
