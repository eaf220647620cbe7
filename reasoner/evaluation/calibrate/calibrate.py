"""Create the calibration of ``auto``: measure the pools, fit the curve, measure the stages with it, fit the stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.protocol.types import EngineClient
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.prompt import resolve_prompt
from reasoner.confidence.calibration import Bin, Calibration, ModelFingerprint, Reliability
from reasoner.evaluation.calibrate.fitting import PROBE, TREES, Measured, fit_curve, fit_stages, gather, reliability
from reasoner.evaluation.calibrate.trials import POOL, Ask, TrialFile, get_problem_key, measure
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.spec import JobSpec, Sampling, StrategySpec
from reasoner.jobs.verifier_specs import PrmVerifier, ProbeVerifier
from reasoner.search.model_selection import policy_selector, verifier_selector

CONFIDENCE = 0.8
WORTH = 3_000
"""Value of one additional right answer, in tokens."""


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
    verifier: PrmVerifier | ProbeVerifier = PrmVerifier(),
    uses_suite_temperature: bool = False,
    defaults: Mapping[str, ModelDefaults] = MappingProxyType({}),
) -> Calibration:
    """Return the table for a policy and a verifier; ``progress(done, total)`` counts runs.

    ``model`` and the verifier's are the only ones by default. Solutions are sampled as the model's settings say in
    ``defaults``, or with the temperature of the suite.

    The curve is fitted on the pools, and the strategies run with it. Its reliability is measured by two-fold
    cross-validation over problems. Raises ``CalibrationError`` for measurements with other settings or if nothing can
    be fitted, and the engine's errors.
    """
    served = await engine.models()
    policy = ModelFingerprint.of_model(policy_selector(JobSpec(problem="any", model=model)).find(served))
    if isinstance(verifier, ProbeVerifier) and verifier.model is None:
        verifier = ProbeVerifier(kind="probe", model=policy.id)  # a default would be left out where a job is copied
    verifies = verifier_selector(verifier)
    assert verifies is not None
    scores = ModelFingerprint.of_verifier(verifier, verifies.find(served))
    problems = {get_problem_key(problem) for suite in suites for problem in suite.problems}

    def ask(suite: Suite, spec: JobSpec) -> JobSpec:
        sampling = Sampling(temperature=suite.temperature) if uses_suite_temperature else spec.sampling
        changes: dict[str, Any] = {"model": policy.id, "verifier": verifier, "sampling": sampling}
        return resolve_prompt(spec.model_copy(update=changes), defaults)

    setting = {"policy": policy.model_dump(), "verifier": scores.model_dump(), "seed": seed, "confidence": CONFIDENCE}
    file = TrialFile(measurements, setting | {"prompts": _list_prompts(suites, ask)})
    num_problems = sum(len(suite.problems) for suite in suites)
    num_done = itertools.count(1)

    async def run(stages: Sequence[StrategySpec], seed: int, table: Calibration | None = None) -> list[Measured]:
        await engine.clear_cache()
        await measure(
            suites,
            stages,
            engine,
            file,
            seed=seed,
            concurrency=concurrency,
            calibration=table,
            ask=ask,
            progress=lambda: progress(next(num_done), num_problems * (1 + len(TREES))),
        )
        return gather(trial for trial in file.trials.values() if trial.problem in problems)

    table = Calibration(
        version=1,
        command=command,
        suites=[suite.name for suite in suites],
        problems=num_problems,
        policy=policy,
        verifier=scores,
        confidence=CONFIDENCE,
        probe=PROBE,
        curve=fit_curve(await run([POOL], seed)),
        bins=[Bin(below=1.0, stages=[], problems=0, accuracy=0.0, tokens=0.0)],
        reliability=Reliability(answers=0, ece=0.0, brier=0.0, bins=[]),
    )
    measured = await run(TREES, seed + 1, table)  # the pool's seed would repeat the pool's solutions
    bins = fit_stages(measured, table.curve, confidence=CONFIDENCE, worth=WORTH)
    held_out = reliability(fit_curve(measured[::2]), measured[1::2])
    return Calibration(**dict(table) | {"bins": bins, "reliability": held_out})


def _list_prompts(suites: Sequence[Suite], ask: Ask) -> list[tuple[str, str, str]]:
    """Return the different system messages, prompts and sampling parameters of the suites' problems."""
    asked = [ask(suite, JobSpec(problem="any", answer=suite.answer_spec)) for suite in suites]
    return sorted({(spec.system or "", spec.prompt or "", spec.sampling.model_dump_json()) for spec in asked})
