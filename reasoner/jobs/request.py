"""Requests of clients: a job, a ranking of candidates. These models are part of the REST schema.

Their validators check, and none writes. What a client leaves open is filled in by ``reasoner.admission``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import StrictModel
from reasoner.budget.spec import Budget
from reasoner.jobs.candidate_spec import Candidates
from reasoner.jobs.messages import check_results
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.spec import SELECTING_STRATEGY, JobFields, StrategySpec
from reasoner.jobs.tool_specs import NamedChoice
from reasoner.jobs.verifier_specs import PrmVerifier

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

_MERGED = (Budget, Sampling, AnswerSpec, PrmVerifier)
"""Parts of a job of which a client may give some fields and leave the others to the defaults."""
_NULL_IS_OPEN = ("model", "seed")


def read_part(part: Any) -> Any:
    """Return a part of a job as a mapping of the fields that were given, if it is merged field by field."""
    if not isinstance(part, _MERGED):
        return part
    keeps_null = isinstance(part, Sampling)
    return {field: value for field, value in part.list_given().items() if keeps_null or value is not None}


class JobRequest(JobFields):
    """A question, a way to search for its answer, and what the search may cost."""

    model_config = ConfigDict(defer_build=True)

    def list_given(self) -> dict[str, Any]:
        """Return what the client said; the parts that are merged field by field are mappings.

        Null leaves a field open, but for those in which it says that there is none, and in ``sampling``, where it asks
        for the model's own value.
        """
        given = {name: read_part(part) for name, part in super().list_given().items()}
        return {name: value for name, value in given.items() if value is not None or name not in _NULL_IS_OPEN}

    @field_validator("problem")
    @classmethod
    def _check_not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("the problem is empty: write the question")
        return value

    @model_validator(mode="after")
    def _check_one_question(self) -> Self:
        if self.problem is None and self.messages is None:
            raise ValueError("there is no question: give 'problem', a text, or 'messages', a conversation")
        if self.problem is not None and self.messages is not None:
            raise ValueError("give either 'problem' or 'messages', not both")
        return self

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        check_results(self.messages or ())
        names = [tool.name for tool in self.functions]
        if self.tool_choice not in ("auto", "none") and not names:
            raise ValueError("tool_choice: there is no function to call: give 'tools' of type 'function'")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.name not in names:
            raise ValueError(
                f"tool_choice: there is no function {self.tool_choice.name!r}; there are {', '.join(names)}"
            )
        return self

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        names = [entry.model for entry in self.models or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"models: {twice!r} is named twice: name each model once, with its weight")
        if names and self.model not in (None, names[0]):
            raise ValueError("give either 'model' or 'models', not both")
        return self

    @model_validator(mode="after")
    def _check_one_system_message(self) -> Self:
        if self.system is not None and self.has_system_message:
            raise ValueError("give either 'system' or a system message in 'messages', not both")
        return self


class Selection(JobRequest):
    """A ranking of a client's own candidates: a job with the fields of the strategy ``select`` beside its own."""

    model_config = ConfigDict(defer_build=False)
    candidates: Candidates
    by: By = None
    schedule: Schedule = "swiss"
    strategy: SkipJsonSchema[StrategySpec] = Field(default_factory=lambda: StrategySpec(name=SELECTING_STRATEGY))

    @model_validator(mode="before")
    @classmethod
    def _check_no_strategy(cls, value: Any) -> Any:
        if isinstance(value, dict) and "strategy" in value:
            raise ValueError("a selection has no 'strategy': give 'by', or submit a job to /v1/jobs")
        return value

    def to_job(self) -> JobRequest:
        """Return the same as a job."""
        fields = StrictModel.list_given(self)
        strategy: dict[str, Any] = {"name": SELECTING_STRATEGY}
        strategy |= {name: fields.pop(name) for name in ("by", "schedule") if name in fields}
        return JobRequest.model_validate(fields | {"strategy": strategy})
