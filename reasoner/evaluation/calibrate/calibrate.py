"""Create the calibration of ``auto``: measure the pools, fit the curve, measure the stages with it, fit the stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.protocol.types import EngineClient, ModelInfo, list_answering
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.resolve import resolve_program_job
from reasoner.confidence.calibration import Bin, Calibration, Curve, ModelFingerprint, Reliability
from reasoner.evaluation.calibrate.families import fit_families, fit_table, name_families
from reasoner.evaluation.calibrate.fitting import (
    PROBE,
    THOUGHTS,
    TREES,
    Measured,
    Stages,
    fit_curve,
    gather,
    list_menu,
    mean_cost,
    reliability,
)
from reasoner.evaluation.calibrate.trials import POOL, VOTING_POOL, Ask, TrialFile, get_problem_key, measure
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.request import JobRequest
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.spec import JobSpec, StrategySpec
from reasoner.jobs.verifier_specs import PrmVerifier, ProbeVerifier
from reasoner.search.policies.selection import ModelSelector, can_generate, verifier_selector
from reasoner.search.policies.thoughts import find_thought_format

CONFIDENCE = 0.8
"""Probability at which the tree searches of the fit stop."""
WORTH = 3_000
"""Least value of one additional right answer, in tokens; at least that of ``WORTH_SAMPLES``."""
WORTH_SAMPLES = 20
"""Number of samples that an additional right answer is worth, where they are long."""


async def calibrate(
    suites: Sequence[Suite],
    engine: EngineClient,
    measurements: Path,
    command: str,
    *,
    seed: int,
    concurrency: int,
    progress: Callable[[int, int], None],
    model: str | None = None,
    verifier: PrmVerifier | ProbeVerifier | None = PrmVerifier(),
    uses_suite_temperature: bool = False,
    defaults: Mapping[str, ModelDefaults] = MappingProxyType({}),
) -> Calibration:
    """Return the table for a policy and a verifier; ``progress(done, total)`` counts runs.

    Without a verifier it is fitted on votes alone. ``model`` and the verifier's are the only ones by default. Solutions
    are sampled as the model's settings say in ``defaults``, or with the temperature of the suite.

    The curve is fitted on the pools, and the strategies run with it. Its reliability is measured by two-fold
    cross-validation over problems. Raises ``CalibrationError`` for measurements with other settings or if nothing can
    be fitted, and the engine's errors.
    """
    served = await list_answering(engine)
    info = ModelSelector("model", model, can_generate).find(served)
    policy = ModelFingerprint.of_model(info)
    if isinstance(verifier, ProbeVerifier) and verifier.model is None:
        verifier = ProbeVerifier(model=policy.id)
    scores = _identify_verifier(verifier, served)
    thoughts = await find_thought_format(engine, info, defaults.get(policy.id, ModelDefaults()).thoughts)
    pool = VOTING_POOL if scores is None else POOL
    stages = (*([] if scores is None else TREES), *([] if thoughts is None else THOUGHTS))
    problems = {get_problem_key(problem) for suite in suites for problem in suite.problems}

    def ask(suite: Suite, request: JobRequest) -> JobSpec:
        changes: dict[str, Any] = {"model": policy.id, "verifier": verifier}
        if uses_suite_temperature:
            changes["sampling"] = Sampling(temperature=suite.temperature)
        return resolve_program_job(request.model_copy(update=changes), defaults)

    setting: dict[str, Any] = {"policy": policy.model_dump(), "seed": seed, "confidence": CONFIDENCE}
    setting["verifier"] = None if scores is None else scores.model_dump()
    file = TrialFile(measurements, setting | {"prompts": _list_prompts(suites, ask)})
    num_problems = sum(len(suite.problems) for suite in suites)
    num_done = itertools.count(1)

    async def run(wanted: Sequence[StrategySpec], seed: int, table: Calibration | None = None) -> list[Measured]:
        await engine.clear_cache()
        await measure(
            suites,
            wanted,
            engine,
            file,
            seed=seed,
            concurrency=concurrency,
            calibration=table,
            ask=ask,
            progress=lambda: progress(next(num_done), num_problems * (1 + len(stages))),
        )
        return gather((trial for trial in file.trials.values() if trial.problem in problems), pool)

    table = _begin_table(command, suites, policy=policy, verifier=scores, curve=fit_curve(await run([pool], seed)))
    measured = await run(stages, seed + 1, table)  # the pool's seed would repeat the pool's solutions
    return Calibration(**dict(table) | _fit(measured, list_menu(stages), name_families(suite.name for suite in suites)))


def _fit(measured: Sequence[Measured], menu: Sequence[Stages], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the table that are fitted; ``names`` are the families by suite."""
    worth = max(WORTH, WORTH_SAMPLES * mean_cost(measured))
    common = fit_table(measured, menu, worth)
    return {
        "bins": common.bins,
        "curve": common.rule.curve,
        "confidence": common.rule.confidence,
        "least_gain": common.rule.least_gain,
        "families": fit_families(measured, menu, names, worth=worth, common=common),
        "reliability": reliability(fit_curve(measured[::2]), measured[1::2]),
    }


def _begin_table(
    command: str, suites: Sequence[Suite], policy: ModelFingerprint, verifier: ModelFingerprint | None, curve: Curve
) -> Calibration:
    """Return a table with the curve alone."""
    return Calibration(
        version=1,
        command=command,
        suites=[suite.name for suite in suites],
        problems=sum(len(suite.problems) for suite in suites),
        policy=policy,
        verifier=verifier,
        confidence=CONFIDENCE,
        probe=PROBE,
        curve=curve,
        bins=[Bin(below=1.0, stages=[], problems=0, accuracy=0.0, tokens=0.0)],
        reliability=Reliability(answers=0, ece=0.0, brier=0.0, bins=[]),
    )


def _identify_verifier(
    verifier: PrmVerifier | ProbeVerifier | None, served: Sequence[ModelInfo]
) -> ModelFingerprint | None:
    selector = verifier_selector(verifier)
    if verifier is None or selector is None:
        return None
    return ModelFingerprint.of_verifier(verifier, selector.find(served))


def _list_prompts(suites: Sequence[Suite], ask: Ask) -> list[tuple[str, str, str]]:
    """Return the different system messages, prompts and sampling parameters of the suites' problems."""
    asked = [ask(suite, JobRequest(problem="any", answer=suite.answer_spec)) for suite in suites]
    return sorted({(spec.system or "", spec.prompt or "", spec.sampling.model_dump_json()) for spec in asked})
