"""The calibration of the ``auto`` strategy: a probability from scores and votes, and the stages to run by difficulty.

``reasoner calibrate`` fits the table. It is valid only for the models that it was fitted for, since scores of other
models have another distribution and their questions another difficulty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from engine.protocol.types import ModelInfo
from reasoner.base_model import StrictModel, VerifierSpec
from reasoner.confidence.posterior import FEATURES, Evidence, compute_features, logistic
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.spec import StrategySpec
from reasoner.jobs.verifier_specs import ProbeVerifier

SHIPPED_CALIBRATION = Path(__file__).parents[1] / "bundled" / "calibration.json"
Share = Annotated[float, Field(ge=0, le=1)]


class CalibrationError(Exception):
    """The calibration cannot be used; the message names the file and the field."""


class ModelFingerprint(StrictModel):
    """Identity of a model: its name, size and weights."""

    id: str
    parameters: int
    vocab_size: int
    fingerprint: str
    """Fingerprint of the weight files; empty if the server does not report one."""

    @classmethod
    def of_model(cls, info: ModelInfo) -> Self:
        return cls(id=info.id, parameters=info.parameters, vocab_size=info.vocab_size, fingerprint=info.fingerprint)

    @classmethod
    def of_verifier(cls, verifier: VerifierSpec, info: ModelInfo) -> Self:
        """Return the identity of the model that scores: ``info``, or its probe if the verifier is one."""
        if not isinstance(verifier, ProbeVerifier) or info.probe is None:
            return cls.of_model(info)
        probe = info.probe
        return cls(id=info.id, parameters=probe.parameters, vocab_size=info.vocab_size, fingerprint=probe.id)

    def __str__(self) -> str:
        return f"{self.id} ({self.parameters} weights, fingerprint {self.fingerprint or 'unknown'})"


class Curve(StrictModel):
    """The probability that an answer is right, as a logistic function of ``reasoner.confidence.posterior``."""

    constant: float
    score: float
    rival_score: float
    votes: float
    rival_votes: float

    def predict(self, answers: Sequence[Evidence], index: int) -> float:
        """Return the probability that ``answers[index]`` is right."""
        weights = (getattr(self, name) for name in FEATURES)
        return logistic(sum(w * x for w, x in zip(weights, compute_features(answers, index), strict=True)))


class Bin(StrictModel):
    """Questions whose answer after the probe is right with a probability below ``below``, and in no lower bin."""

    below: Annotated[float, Field(gt=0, le=1)]
    stages: Annotated[list[StrategySpec], Field(max_length=16)]
    """Strategies to run one after another until the answer is probable enough."""
    problems: Annotated[int, Field(ge=0)]
    """Number of problems of the fit in this bin; ``accuracy`` and ``tokens`` are means over them."""
    accuracy: Share
    tokens: Annotated[float, Field(ge=0)]

    @field_validator("stages")
    @classmethod
    def _check_auto_is_no_stage(cls, value: list[StrategySpec]) -> list[StrategySpec]:
        if any(stage.name == "auto" for stage in value):
            raise ValueError("auto cannot be a stage of itself")
        return value


class Reliability(StrictModel):
    """Reliability of the curve's probabilities on problems that it was not fitted on."""

    answers: int
    ece: Share
    """Weighted expected calibration error over ten bins of equal width."""
    brier: Share
    bins: list[tuple[float, float, float]]
    """(mean predicted probability, fraction right, weight) of each non-empty bin."""


class Check(StrictModel):
    """``auto`` beside all samples of the pool, on problems that were not fitted; both are simulated from the trials."""

    problems: Annotated[int, Field(ge=0)]
    accuracy: Share
    reference: Share
    """Accuracy of the best-scored sample of the whole pool; without a verifier, of its majority."""
    error: Annotated[float, Field(ge=0)]
    """Standard error of the difference of both."""
    tokens: Annotated[float, Field(ge=0)]
    reference_tokens: Annotated[float, Field(ge=0)]

    @property
    def is_behind(self) -> bool:
        """True if ``auto`` has lost more than chance explains: one standard error."""
        return self.accuracy < self.reference - self.error

    def __str__(self) -> str:
        return f"{self.accuracy:.3f} beside {self.reference:.3f}, on {self.problems} problems"


class Family(StrictModel):
    """A table fitted on the problems of one suite alone."""

    name: str
    curve: Curve
    confidence: Share
    """Probability at which ``auto`` stops if the job sets none."""
    least_gain: Share = 0.0
    """Probability that a better answer is new, below which ``auto`` stops."""
    bins: Annotated[list[Bin], Field(min_length=1, max_length=32)]
    check: Check
    common: Check
    """The curve and the bins of all families together, on the problems of this one."""


class Calibration(StrictModel):
    """A fitted table: the schema of its file."""

    version: Literal[1]
    command: str
    suites: Annotated[list[str], Field(min_length=1)]
    problems: Annotated[int, Field(ge=1)]
    policy: ModelFingerprint
    verifier: ModelFingerprint | None
    """``None`` if the table was fitted on votes alone."""
    confidence: Share
    """Probability at which ``auto`` stops if the job sets none."""
    probe: Annotated[int, Field(ge=1, le=MAX_N)]
    curve: Curve
    bins: Annotated[list[Bin], Field(min_length=1, max_length=32)]
    """Bins by increasing ``below``; the last one ends at 1."""
    reliability: Reliability
    least_gain: Share = 0.0
    """Probability that a better answer is new, below which ``auto`` stops (``novelty.compute_gain``)."""
    families: Annotated[list[Family], Field(max_length=256)] = Field(default_factory=list)
    """A table for each family of tasks, for jobs that name theirs."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for bins in (self.bins, *(family.bins for family in self.families)):
            edges = [difficulty.below for difficulty in bins]
            if edges != sorted(set(edges)) or edges[-1] != 1.0:
                raise ValueError(f"bins: 'below' must rise and end at 1, got {edges}")
        names = [family.name for family in self.families]
        if len(set(names)) < len(names):
            raise ValueError(f"families: each name once, got {names}")
        return self

    def list_weak_families(self) -> list[Family]:
        """Return the families on which what is common to all of them is behind the whole pool."""
        return [family for family in self.families if family.common.is_behind]

    def narrow(self, name: str) -> Calibration:
        """Return the table of one family. Raises ``KeyError`` for a name that it does not have."""
        for family in self.families:
            if family.name == name:
                parts = {"curve": family.curve, "confidence": family.confidence, "bins": family.bins}
                return self.model_copy(update=parts | {"least_gain": family.least_gain, "families": []})
        raise KeyError(name)

    def select_stages(self, confidence: float) -> list[StrategySpec]:
        """Return the stages for a question whose answer after the probe is right with this probability."""
        return next(
            difficulty.stages for difficulty in self.bins if confidence < difficulty.below or difficulty.below == 1.0
        )

    def find_mismatch(self, policy: ModelFingerprint, verifier: ModelFingerprint | None) -> str | None:
        """Return why the table is not valid for these models, naming both sides, or ``None`` if it is.

        ``verifier``: ``None`` for a job without one.
        """
        for role, fitted, served in (("policy", self.policy, policy), ("verifier", self.verifier, verifier)):
            if fitted is None or served is None:
                differs = fitted is not served
            else:
                has_fingerprints = fitted.fingerprint and served.fingerprint
                differs = fitted.fingerprint != served.fingerprint if has_fingerprints else fitted != served
            if differs:
                return f"the calibration was fitted for the {role} {fitted}, and this job runs on {served}"
        return None


def read_calibration(path: Path) -> Calibration:
    """Read the table in ``path``; ``reasoner.admission.calibration`` checks the strategies that its stages name.

    Raises ``CalibrationError``, naming the file and the field, for a file that is missing or holds no valid table.
    """
    try:
        return Calibration.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"calibration {path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise CalibrationError(f"calibration {path}: {field}: {first['msg'].removeprefix('Value error, ')}") from None


@cache
def shipped_calibration() -> Calibration:
    """Return the calibration of the bundled models."""
    return read_calibration(SHIPPED_CALIBRATION)
