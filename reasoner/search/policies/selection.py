"""Selection of a job's models among the served ones: the policy that writes solutions, and the verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.protocol.types import InvalidRequest, ModelInfo
from prm.formats.registry import find_format
from prm.scorers.outcome import is_outcome_model
from reasoner.base_model import VerifierSpec
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.verifier_specs import LanguageModelVerifier, OutcomeVerifier, PrmVerifier, ProbeVerifier

_NO_PROBE = (
    "has no probe; served with one are {}: fit one with 'reasoner prm train --probe', and serve it by --probe or "
    "from the folder 'probe' beside the weights"
)


@dataclass(frozen=True, slots=True)
class ModelSelector:
    """A model that a job needs. ``field`` is the job's field; ``name`` is ``None`` where the job leaves it open."""

    field: str
    name: str | None
    fits: Callable[[ModelInfo], bool]
    refusal: str = "is not served; served are {}"
    """Reason to refuse another name; the braces are replaced by the names of the models that fit."""

    def find(self, served: Iterable[ModelInfo]) -> ModelInfo:
        """Return the model of that name, or the only one that fits. Raises ``InvalidRequest`` that lists them."""
        fitting = {info.id: info for info in served if self.fits(info)}
        name = self.name
        if name is None and len(fitting) == 1:
            name = next(iter(fitting))
        if name not in fitting:
            listed = ", ".join(sorted(fitting)) or "none"
            raise InvalidRequest(f"{self.field} {name!r} {self.refusal.format(listed)}", self.field)
        return fitting[name]


def policy_selector(spec: JobSpec) -> ModelSelector:
    """Return the selector of the model that writes the solutions."""
    return ModelSelector("model", spec.model, can_generate)


def policy_selectors(spec: JobSpec) -> list[tuple[ModelSelector, float]]:
    """Return the selectors of all models that write solutions, with their weights."""
    if spec.models is None:
        return [(policy_selector(spec), 1.0)]
    entries = enumerate(spec.models)
    return [(ModelSelector(f"models.{i}.model", entry.model, can_generate), entry.weight) for i, entry in entries]


def verifier_selector(verifier: VerifierSpec | None) -> ModelSelector | None:
    """Return the selector of the verifier's model; ``None`` for a verifier without one."""
    match verifier:
        case PrmVerifier(model=name):
            return ModelSelector("verifier.model", name, can_score_steps)
        case LanguageModelVerifier(model=name):
            return ModelSelector("verifier.model", name, can_generate)
        case OutcomeVerifier(model=name):
            return ModelSelector("verifier.model", name, is_outcome_model)
        case ProbeVerifier(model=name):
            return ModelSelector("verifier.model", name, lambda info: info.probe is not None, _NO_PROBE)
    return None


def can_generate(info: ModelInfo) -> bool:
    return info.kind == "generate" and find_format(info) is None


def can_score_steps(info: ModelInfo) -> bool:
    """Include models without notes on their format: opening them raises an error that names the formats."""
    return find_format(info) is not None or info.architecture.endswith("ForTokenClassification")
