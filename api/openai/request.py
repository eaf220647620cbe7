"""The request fields that both OpenAI routes share, and their conversion to a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from api.http.problems import Problem
from api.openai.sent_fields import Turn
from reasoner.admission.effort import Effort, find_contradiction
from reasoner.admission.names import NameFault, find_name
from reasoner.admission.sources import EFFORT, Submission, merge_sources
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import StrictModel, VerifierSpec
from reasoner.budget.spec import MAX_BUDGET_TOKENS, Budget
from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.messages import Message
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import FALLBACK_STRATEGY, StopStrings, StrategySpec, TemplateKwargs
from reasoner.jobs.thought_spec import ThoughtSpec
from reasoner.jobs.tool_specs import FunctionTool, PythonTool, ToolChoice
from reasoner.jobs.verifier_specs import Verifier
from workers.config.settings import Settings

Tokens = Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)]
Summary = Literal["auto", "concise", "detailed"]
_JOB_FIELDS = (
    *("strategy", "verifier", "answer", "confidence", "deterministic", "priority", "webhook"),
    *("chat_template_kwargs", "thoughts", "constraint", "parallel_tool_calls", "tool_vote", "tool_format"),
)


class Reasoning(StrictModel):
    """OpenAI's ``reasoning``: the effort of the search, and the detail of the narration."""

    effort: str | None = Field(None, description="A budget and a strategy by name: minimal, low, medium, high, …")
    max_tokens: Tokens | None = Field(None, description="Bounds the job's tokens.")
    summary: Summary | None = Field(
        None, description="concise: each new leading answer; detailed, and auto: every finished branch too."
    )
    generate_summary: Summary | None = Field(None, description="The same as summary.")
    context: Literal["auto", "current_turn"] | None = None
    mode: Literal["standard"] | None = None


class Thinking(StrictModel):
    """Anthropic's ``thinking``: a bound of the budget."""

    type: Literal["enabled"]
    budget_tokens: Annotated[Tokens, Field(description="Bounds the job's tokens.")]


def _to_list(value: Any) -> Any:
    return [text for text in (value,) if text] if isinstance(value, str) else value


class OpenAIRequest(StrictModel):
    """OpenAI's fields that both routes take. Those that are not OpenAI's are as in ``POST /v1/jobs``."""

    model: str = Field(description="A served model, or a name that stands for a search: GET /v1/models.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: Annotated[StopStrings, BeforeValidator(_to_list)] | None = Field(
        None, description="One text, or several, that end each solution and are left out of it."
    )
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
    chat_template_kwargs: TemplateKwargs | None = None
    thoughts: ThoughtSpec | None = None
    constraint: ConstraintSpec | None = None
    parallel_tool_calls: bool | None = None
    tool_vote: Literal["name", "arguments", "exact"] | None = None
    tool_format: str | None = None
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    deterministic: bool | None = None
    priority: Literal["interactive", "batch"] | None = None
    webhook: str | None = None

    @model_validator(mode="after")
    def _check_metadata_conflicts(self) -> Self:
        for name in self._user_metadata():
            if name in (self.metadata or {}):
                raise ValueError(f"give either the field {name!r} or {name!r} in 'metadata', not both")
        return self

    def efforts(self) -> dict[str, str]:
        """Return the names of efforts by the fields that give one."""
        given = {
            "reasoning.effort": self.reasoning.effort if self.reasoning else None,
            "budget.effort": self.budget.effort if self.budget else None,
        }
        return {field: name for field, name in given.items() if name is not None}

    def job_tools(self) -> tuple[list[PythonTool | FunctionTool], ToolChoice | None]:
        """Return the job's tools, and its choice among them."""
        return [], None

    def format_constraint(self) -> ConstraintSpec | None:
        """Return the constraint that OpenAI's format of the answer asks for."""
        return None

    def sampling(self) -> dict[str, float | None]:
        """Return the sampling parameters that the request may give."""
        return {"temperature": self.temperature, "top_p": self.top_p}

    def more_job_fields(self) -> dict[str, Any]:
        """Return the fields of the job that only some routes have."""
        return {}

    def token_bounds(self) -> dict[str, int]:
        """Return all bounds of the job's tokens by their fields. The smallest holds."""
        given = {
            "reasoning.max_tokens": self.reasoning.max_tokens if self.reasoning else None,
            "thinking.budget_tokens": self.thinking.budget_tokens if self.thinking else None,
        }
        return {field: tokens for field, tokens in given.items() if tokens is not None}

    def sent_fields(self, turns: Sequence[Turn]) -> dict[str, str]:
        """Return the request's fields by the job's fields that come from them, where the names differ."""
        bounds = self.token_bounds()
        names = {f"sampling.{name}": name for name, value in self.sampling().items() if value is not None}
        names |= {f"metadata.{name}": name for name in self._user_metadata()}
        names |= {f"messages.{index}": turn.field for index, turn in enumerate(turns)}
        is_bounded = bool(bounds) and (self.budget is None or self.budget.tokens is None)
        return names | ({"budget.tokens": min(bounds, key=bounds.__getitem__)} if is_bounded else {})

    def to_job(self, conversation: list[Message], settings: Settings) -> JobRequest:
        """Return the job for a conversation. The token bounds also limit the tokens of an effort.

        Raises ``ValidationError`` that names the job's field, or ``Problem`` that names the request's.
        """
        efforts = settings.effort
        budget = (self.budget or Budget()).model_copy(update={"effort": self._find_effort(efforts)})
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": conversation,
            "seed": self.seed,
            "stop": self.stop,
            "budget": None if budget == Budget() else budget,
            "sampling": {name: value for name, value in self.sampling().items() if value is not None},
            "metadata": {**(self.metadata or {}), **self._user_metadata()},
            **{name: getattr(self, name) for name in _JOB_FIELDS},
            **self.more_job_fields(),
        }
        if (constraint := self.format_constraint()) is not None:
            fields["constraint"] = constraint
        tools, fields["tool_choice"] = self.job_tools()
        fields["tools"] = tools or None
        compares = self._compares_answers(settings)
        if not compares and fields["constraint"] is None:
            fields["answer"] = AnswerSpec(compare="text", extract="all")
        job = JobRequest.model_validate({name: value for name, value in fields.items() if value not in (None, {})})
        verifier = merge_sources(Submission.to_service(job, settings)).spec.verifier
        if not compares and verifier is None:  # nothing could choose among several
            samples = StrategySpec.model_validate({"name": FALLBACK_STRATEGY, "n": job.alternatives + 1})
            job = job.model_copy(update={"strategy": samples})
        return _apply_bounds(job, list(self.token_bounds().values()), settings)

    def _compares_answers(self, settings: Settings) -> bool:
        """Return True if the client, its effort or the operator says how answers are found, compared or searched for.

        Otherwise the request is a conversation, whose solutions are chosen as whole texts.
        """
        try:
            name = find_name(self.model, settings)
        except NameFault:
            return False  # the admission refuses it
        named = {} if name is None else name.fields
        effort = settings.effort.get(next(iter(self.efforts().values()), ""))
        defaults = settings.models.get(named.get("model", self.model))
        own = (self.strategy, self.answer, self.confidence, self.tool_vote)
        others = (effort and effort.strategy, defaults and defaults.strategy, defaults and defaults.answer)
        of_name = (*map(named.get, ("strategy", "answer", "confidence")), name and name.effort_strategy)
        verifier = self.verifier or named.get("verifier")
        is_rule = isinstance(verifier, VerifierSpec) and verifier.is_conclusive
        return is_rule or any(value is not None for value in (*own, *others, *of_name))

    def _user_metadata(self) -> dict[str, str]:
        fields = {"user": self.user, "safety_identifier": self.safety_identifier}
        return {name: value for name, value in fields.items() if value is not None}

    def _find_effort(self, efforts: Mapping[str, Effort]) -> str | None:
        given = self.efforts()
        for field, name in given.items():
            if name not in efforts:
                raise _invalid_field(field, f"there is no effort {name!r}; known are {', '.join(efforts)}")
        if len(set(given.values())) > 1:
            raise _invalid_field(min(given), f"{' and '.join(given)} contradict each other: give one of them")
        return next(iter(given.values()), None)


def _apply_bounds(job: JobRequest, bounds: list[int], settings: Settings) -> JobRequest:
    """Return the job with a token budget of at most the smallest bound.

    An effort with a larger one is replaced by its other limits and its strategy. A smaller one of a name stays.
    """
    if not bounds:
        return job
    if (contradiction := find_contradiction(job.budget, settings.effort)) is not None:
        field = contradiction.field or "budget"
        raise _invalid_field(field, str(contradiction).removeprefix(f"{field}: "))
    changes: dict[str, Any] = {}
    budget = job.budget
    submission = Submission.to_service(job, settings)
    tokens = budget.tokens
    if budget.effort is not None:
        merged = merge_sources(submission)
        budget, tokens = merged.spec.budget, merged.spec.budget.tokens
        if merged.origins["strategy"] == EFFORT:
            changes["strategy"] = merged.spec.strategy
    elif tokens is None and submission.name is not None:
        tokens = submission.name.fields.get("budget", {}).get("tokens")
    if tokens is not None and tokens <= min(bounds):
        return job
    changes["budget"] = budget.model_copy(update={"tokens": min(bounds), "effort": None})
    return job.model_copy(update=changes)


def _invalid_field(field: str, message: str) -> Problem:
    return Problem(422, "invalid-request", f"{field}: {message}", errors=[(field, message)])
