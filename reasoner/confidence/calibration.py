"""The table of ``auto``: which scores and votes mean how much, and what to do next for a question of this difficulty.

``reasoner calibrate`` fits it. It holds for the models that it was fitted for and for no others: their scores mean
something else, and so does the amount that a question needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from engine.protocol.types import ModelInfo
from reasoner.base_model import StrictModel
from reasoner.confidence.posterior import FEATURES, Evidence, compute_features, logistic
from reasoner.jobs.spec import MAX_N, StrategySpec

SHIPPED_CALIBRATION = Path(__file__).parents[1] / "bundled" / "calibration.json"
Share = Annotated[float, Field(ge=0, le=1)]


class CalibrationError(Exception):
    """A table that cannot be used; the message names the file and the field."""


class ModelFingerprint(StrictModel):
    """What tells one model from another."""

    id: str
    parameters: int
    vocab_size: int
    fingerprint: str
    """Of the weights' files; empty where a server does not say."""

    @classmethod
    def of(cls, info: ModelInfo) -> Self:
        return cls(id=info.id, parameters=info.parameters, vocab_size=info.vocab_size, fingerprint=info.fingerprint)

    def __str__(self) -> str:
        return f"{self.id} ({self.parameters} weights, fingerprint {self.fingerprint or 'unknown'})"


class Curve(StrictModel):
    """The probability that an answer is right, as a logistic function of ``reasoner.confidence.posterior``."""

    constant: float
    score: float
    rival_score: float
    votes: float
    rival_votes: float

    def right(self, answers: Sequence[Evidence], index: int) -> float:
        weights = (getattr(self, name) for name in FEATURES)
        return logistic(sum(w * x for w, x in zip(weights, compute_features(answers, index), strict=True)))


class Bin(StrictModel):
    """Questions whose answer after the probe is right with a probability below ``below`` (and no lower bin's)."""

    below: Annotated[float, Field(gt=0, le=1)]
    stages: Annotated[list[StrategySpec], Field(max_length=16)]
    """What is done one after another until the answer is certain enough; names and parameters of strategies."""
    problems: Annotated[int, Field(ge=0)]
    """How many of the problems of the fit were here, and what the stages gave there."""
    accuracy: Share
    tokens: Annotated[float, Field(ge=0)]

    @field_validator("stages")
    @classmethod
    def _check_auto_is_no_stage(cls, value: list[StrategySpec]) -> list[StrategySpec]:
        if any(stage.name == "auto" for stage in value):
            raise ValueError("auto cannot be a stage of itself")
        return value


class Reliability(StrictModel):
    """How well the curve's probabilities held on problems that it was not fitted on."""

    answers: int
    ece: Share
    """Expected calibration error over ten bins of equal width, weighted."""
    brier: Share
    bins: list[tuple[float, float, float]]
    """(mean predicted probability, share that was right, weight) of each bin that is not empty."""


class Calibration(StrictModel):
    """A fitted table, as it stands in its file."""

    version: Literal[1]
    command: str
    suites: Annotated[list[str], Field(min_length=1)]
    problems: Annotated[int, Field(ge=1)]
    policy: ModelFingerprint
    verifier: ModelFingerprint
    confidence: Share
    """Where ``auto`` stops when a job does not say."""
    probe: Annotated[int, Field(ge=1, le=MAX_N)]
    curve: Curve
    bins: Annotated[list[Bin], Field(min_length=1, max_length=32)]
    """By rising ``below``; the last one ends at 1."""
    reliability: Reliability

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        edges = [part.below for part in self.bins]
        if edges != sorted(set(edges)) or edges[-1] != 1.0:
            raise ValueError(f"bins: 'below' must rise and end at 1, got {edges}")
        return self

    def stages(self, confidence: float) -> list[StrategySpec]:
        """What to do for a question whose answer is right with this probability after the probe."""
        return next(part.stages for part in self.bins if confidence < part.below or part.below == 1.0)

    def mismatch(self, policy: ModelInfo, verifier: ModelInfo) -> str | None:
        """Why the table does not hold for these models, naming both sides; ``None`` when it does."""
        for role, fitted, asked in (("policy", self.policy, policy), ("verifier", self.verifier, verifier)):
            here = ModelFingerprint.of(asked)
            known = fitted.fingerprint and here.fingerprint
            if (fitted.fingerprint != here.fingerprint) if known else fitted != here:
                return f"the calibration was fitted for the {role} {fitted}, and this job runs on {here}"
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
    """The table of the bundled models."""
    return read_calibration(SHIPPED_CALIBRATION)
