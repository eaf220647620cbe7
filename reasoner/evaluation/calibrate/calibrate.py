"""Create the calibration of ``auto``: measure the pools, fit the curve, measure the stages with it, fit the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.protocol.types import EngineClient
from reasoner.confidence.calibration import Bin, Calibration, Curve, ModelFingerprint, Reliability
from reasoner.evaluation.calibrate.fitting import PROBE, TREES, Measured, fit_curve, fit_stages, gather, reliability
from reasoner.evaluation.calibrate.trials import POOL, TrialFile, get_problem_key, measure
from reasoner.evaluation.suites.suite import Suite
from reasoner.jobs.spec import JobSpec, StrategySpec
from reasoner.jobs.verifier_specs import PrmVerifier
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
) -> Calibration:
    """Return the table for the engine's only policy and only verifier; ``progress(done, total)`` counts runs.

    The curve is fitted on the pools, and the strategies run with it. Its reliability is measured by two-fold
    cross-validation over problems. Raises ``CalibrationError`` for measurements with other settings or if nothing can
    be fitted, and the engine's errors.
    """
    served = await engine.models()
    verifies = verifier_selector(PrmVerifier())
    assert verifies is not None
    policy = ModelFingerprint.of_model(policy_selector(JobSpec(problem="any")).find(served))
    verifier = ModelFingerprint.of_model(verifies.find(served))
    problems = [problem for suite in suites for problem in suite.problems]
    setting = {"policy": policy.model_dump(), "verifier": verifier.model_dump(), "seed": seed, "confidence": CONFIDENCE}
    file = TrialFile(measurements, setting)
    total, done = len(problems) * (1 + len(TREES)), 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    def table(curve: Curve, bins: list[Bin], held: Reliability) -> Calibration:
        return Calibration(
            version=1,
            command=command,
            suites=[suite.name for suite in suites],
            problems=len(problems),
            policy=policy,
            verifier=verifier,
            confidence=CONFIDENCE,
            probe=PROBE,
            curve=curve,
            bins=bins,
            reliability=held,
        )

    async def run(stages: Sequence[StrategySpec], stop: Calibration | None) -> list[Measured]:
        await engine.clear_cache()
        await measure(
            suites,
            stages,
            engine,
            file,
            seed=seed if stop is None else seed + 1,  # the pool's seed would repeat the pool's solutions
            concurrency=concurrency,
            calibration=stop,
            progress=advance,
        )
        wanted = {get_problem_key(problem) for problem in problems}
        return gather(trial for trial in file.trials.values() if trial.problem in wanted)

    curve = fit_curve(await run([POOL], None))
    nothing = Reliability(answers=0, ece=0.0, brier=0.0, bins=[])
    stop = table(curve, [Bin(below=1.0, stages=[], problems=0, accuracy=0.0, tokens=0.0)], nothing)
    measured = await run(TREES, stop)
    held = reliability(fit_curve(measured[::2]), measured[1::2])
    bins = fit_stages(measured, curve, confidence=CONFIDENCE, worth=WORTH)
    return table(curve, bins, held)
