"""What both of OpenAI's routes take, and the job that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError, model_validator

from api.http.problems import Problem
from engine.protocol.types import InvalidRequest
from reasoner.admission.effort import Effort, apply_effort
from reasoner.admission.resolve import use_available_verifier
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import StrictModel
from reasoner.budget.spec import MAX_BUDGET_TOKENS, Budget
from reasoner.jobs.spec import JobSpec, Message, StrategySpec
from reasoner.jobs.verifier_specs import Verifier
from workers.config.settings import Settings

Tokens = Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)]
Summary = Literal["auto", "concise", "detailed"]
_EXTENSION = ("strategy", "verifier", "answer", "confidence", "deterministic", "priority", "webhook")


class Reasoning(StrictModel):
    """How hard to search, and how much to tell of it."""

    effort: str | None = Field(None, description="A budget and a strategy by name: minimal, low, medium, high, …")
    max_tokens: Tokens | None = Field(None, description="Bounds the job's tokens.")
    summary: Summary | None = Field(
        None, description="concise: what takes the lead; detailed, and auto: every branch that ends as well."
    )


class Thinking(StrictModel):
    """Anthropic's way to bound a budget."""

    type: Literal["enabled"]
    budget_tokens: Annotated[Tokens, Field(description="Bounds the job's tokens.")]


class Asked(StrictModel):
    """A question in OpenAI's words. What is not OpenAI's is as in ``POST /v1/jobs``."""

    model: str = Field(description="Name of a served model: GET /v1/models.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = Field(None, description="Becomes metadata.user.")
    safety_identifier: str | None = Field(None, description="Becomes metadata.safety_identifier.")
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    stream: bool | None = None
    strategy: StrategySpec | None = None
    budget: Budget | None = None
    verifier: Verifier | None = None
    answer: AnswerSpec | None = None
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    deterministic: bool | None = None
    priority: Literal["interactive", "batch"] | None = None
    webhook: str | None = None

    @model_validator(mode="after")
    def _marks_are_free(self) -> Self:
        for name in self._marks():
            if name in (self.metadata or {}):
                raise ValueError(f"give either {name!r} or a {name!r} in 'metadata'")
        return self

    def efforts(self) -> dict[str, str]:
        """Names of efforts by the fields that give one."""
        given = {
            "reasoning.effort": self.reasoning.effort if self.reasoning else None,
            "budget.effort": self.budget.effort if self.budget else None,
        }
        return {field: name for field, name in given.items() if name is not None}

    def bounds(self) -> list[int]:
        """All that bounds the job's tokens; the smallest holds."""
        given = (
            self.reasoning.max_tokens if self.reasoning else None,
            self.thinking.budget_tokens if self.thinking else None,
        )
        return [tokens for tokens in given if tokens is not None]

    def to_job(self, conversation: list[Message], settings: Settings) -> JobSpec:
        """The job, with what the model gets to read. An effort's tokens may be bounded further.

        Raises what becomes a 4xx that names the field.
        """
        efforts = settings.effort
        budget = (self.budget or Budget()).model_copy(update={"effort": self._effort(efforts)})
        sampling = {"temperature": self.temperature, "top_p": self.top_p}
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": conversation,
            "seed": self.seed,
            "budget": None if budget == Budget() else budget,
            "sampling": {name: value for name, value in sampling.items() if value is not None},
            "metadata": {**(self.metadata or {}), **self._marks()},
            **{name: getattr(self, name) for name in _EXTENSION},
        }
        try:
            spec = JobSpec.model_validate({name: value for name, value in fields.items() if value not in (None, {})})
        except ValidationError as error:
            found = [{**part, "loc": ("body", *part["loc"])} for part in error.errors()]
            raise RequestValidationError(found) from None
        return _bounded(use_available_verifier(spec, settings), self.bounds(), efforts)

    def _marks(self) -> dict[str, str]:
        marks = {"user": self.user, "safety_identifier": self.safety_identifier}
        return {name: mark for name, mark in marks.items() if mark is not None}

    def _effort(self, efforts: Mapping[str, Effort]) -> str | None:
        given = self.efforts()
        for field, name in given.items():
            if name not in efforts:
                raise _refusal(field, f"there is no effort {name!r}; known are {', '.join(efforts)}")
        if len(set(given.values())) > 1:
            raise _refusal(min(given), f"{' and '.join(given)} say different things: give one of them")
        return next(iter(given.values()), None)


def _bounded(spec: JobSpec, bounds: list[int], efforts: Mapping[str, Effort]) -> JobSpec:
    if not bounds:
        return spec
    try:
        spec = apply_effort(spec, efforts)
    except InvalidRequest as error:
        field = error.field or "budget"
        raise _refusal(field, str(error).removeprefix(f"{field}: ")) from None
    limit = spec.budget.tokens
    if limit is not None and limit <= min(bounds):
        return spec
    return spec.model_copy(update={"budget": spec.budget.model_copy(update={"tokens": min(bounds), "effort": None})})


def _refusal(field: str, message: str) -> Problem:
    return Problem(422, "invalid-request", f"{field}: {message}", errors=[(field, message)])
