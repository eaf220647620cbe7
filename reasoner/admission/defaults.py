"""Default settings by model for the fields that a job leaves open, configured by the operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from reasoner.admission.effort import DefaultStrategy, Effort
from reasoner.base_model import StrictModel
from reasoner.budget.spec import Budget
from reasoner.jobs.spec import JobSpec, Sampling


class ModelDefaults(StrictModel):
    """Defaults of one model. A job's own settings take precedence, those of ``sampling`` field by field."""

    sampling: Sampling = Field(default_factory=Sampling)
    budget: Budget = Field(default_factory=Budget)
    strategy: DefaultStrategy | None = Field(None, description="A name, or a name with parameters.")


def apply_defaults(spec: JobSpec, defaults: ModelDefaults, efforts: Mapping[str, Effort]) -> JobSpec:
    """Return the job with defaults for the fields that it leaves open. A named effort's strategy takes precedence.

    The compatibility of the default strategy with the rest of the job is checked by ``check_job``.
    """
    given = spec.sampling.model_dump(exclude_unset=True)
    changes: dict[str, Any] = {"sampling": defaults.sampling.model_dump(exclude_unset=True) | given}
    named = efforts.get(spec.budget.effort or "")
    if defaults.strategy is not None and "strategy" not in spec.model_fields_set and not (named and named.strategy):
        changes["strategy"] = defaults.strategy.model_dump()
    if spec.budget == Budget():
        changes["budget"] = defaults.budget.model_dump(exclude_unset=True)
    return JobSpec.model_validate(spec.model_dump(exclude_unset=True) | changes)
