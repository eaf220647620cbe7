"""The body of ``POST /v1/select``: a question, the client's own candidates, and the rule that ranks them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from reasoner.jobs.candidate_spec import Candidates
from reasoner.jobs.spec import SELECTING_STRATEGY, JobSpec, StrategySpec

SelectionRule = Literal["verifier", "majority", "weighted", "tournament"]
ScheduleName = Literal["knockout", "swiss", "pivot"]

By = Annotated[
    SelectionRule | None,
    Field(
        description="What ranks: the verifier's scores, the votes for each answer, votes weighted by scores, or a "
        "tournament. By default the verifier, if there is one, else the votes."
    ),
]
Schedule = Annotated[ScheduleName, Field(description="Who meets whom in a tournament, as of the strategy tournament.")]


class Selection(JobSpec):
    """A ranking of a client's own candidates: a job with the fields of the strategy ``select`` beside its own."""

    model_config = ConfigDict(defer_build=False)
    candidates: Candidates
    by: By = None
    schedule: Schedule = "swiss"
    strategy: SkipJsonSchema[StrategySpec] = Field(default_factory=lambda: StrategySpec(name=SELECTING_STRATEGY))

    @model_validator(mode="before")
    @classmethod
    def _build_strategy(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "strategy" in value:
            raise ValueError("a selection has no 'strategy': give 'by', or submit a job to /v1/jobs")
        params = {name: value[name] for name in ("by", "schedule") if name in value}
        return value | {"strategy": {"name": SELECTING_STRATEGY, **params}}

    def to_job(self) -> JobSpec:
        """Return the same as a job."""
        return JobSpec.model_validate(self.model_dump(exclude_unset=True, exclude={"by", "schedule"}))
