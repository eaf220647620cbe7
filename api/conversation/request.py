"""The fields of a job that clients give beside those of their API's format, and the conversion to a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from api.conversation.sent_fields import Turn, refuse_field
from engine.protocol.types import ModelInfo
from reasoner.admission.effort import Effort, find_contradiction
from reasoner.admission.names import NameFault, find_name
from reasoner.admission.sources import EFFORT, Submission, merge_sources
from reasoner.answers.spec import AnswerSpec
from reasoner.base_model import StrictModel, VerifierSpec
from reasoner.budget.spec import MAX_BUDGET_TOKENS, Budget
from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.messages import Message
from reasoner.jobs.request import JobRequest
from reasoner.jobs.spec import FALLBACK_STRATEGY, StrategySpec, TemplateKwargs
from reasoner.jobs.thought_spec import ThoughtSpec
from reasoner.jobs.tool_specs import FunctionTool, PythonTool, ToolChoice
from reasoner.jobs.verifier_specs import Verifier
from workers.config.settings import Settings

Tokens = Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)]
_JOB_FIELDS = (
    *("strategy", "verifier", "answer", "confidence", "deterministic", "priority", "webhook"),
    *("chat_template_kwargs", "thoughts", "constraint", "tool_vote", "tool_format"),
)


class ConversationRequest(StrictModel):
    """The fields that requests of all formats have. Those that are this service's own are as in ``POST /v1/jobs``."""

    model: str = Field(description="A served model, or a name that stands for a search: GET /v1/models.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stream: bool | None = None
    strategy: StrategySpec | None = None
    budget: Budget | None = None
    verifier: Verifier | None = None
    answer: AnswerSpec | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    thoughts: ThoughtSpec | None = None
    constraint: ConstraintSpec | None = None
    tool_vote: Literal["name", "arguments", "exact"] | None = None
    tool_format: str | None = None
    confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    deterministic: bool | None = None
    priority: Literal["interactive", "batch"] | None = None
    webhook: str | None = None

    def efforts(self) -> dict[str, str]:
        """Return the names of efforts by the fields that give one."""
        return {} if self.budget is None or self.budget.effort is None else {"budget.effort": self.budget.effort}

    def job_tools(self) -> tuple[list[PythonTool | FunctionTool], ToolChoice | None]:
        """Return the job's tools, and its choice among them."""
        return [], None

    def job_metadata(self) -> dict[str, str]:
        """Return the metadata of the job."""
        return {}

    def stop_strings(self) -> list[str] | None:
        """Return the texts that end each solution."""
        return None

    def format_constraint(self) -> ConstraintSpec | None:
        """Return the constraint that the format of the answer asks for."""
        return None

    def sampling(self) -> dict[str, float | None]:
        """Return the sampling parameters that the request may give."""
        return {"temperature": self.temperature, "top_p": self.top_p}

    def more_job_fields(self) -> dict[str, Any]:
        """Return the fields of the job that only some formats have."""
        return {}

    def token_bounds(self) -> dict[str, int]:
        """Return all bounds of the job's tokens by their fields. The smallest holds."""
        return {}

    def thought_bounds(self) -> dict[str, int]:
        """Return all bounds of a single solution's thought by their fields. The smallest holds."""
        limit = None if self.budget is None else self.budget.thinking_tokens
        return {} if limit is None else {"budget.thinking_tokens": limit}

    def sent_fields(self, turns: Sequence[Turn]) -> dict[str, str]:
        """Return the request's fields by the job's fields that come from them, where the names differ."""
        bounds, thought_bounds = self.token_bounds(), self.thought_bounds()
        names = {f"sampling.{name}": name for name, value in self.sampling().items() if value is not None}
        names |= {f"messages.{index}": turn.field for index, turn in enumerate(turns)}
        if thought_bounds:
            names["budget.thinking_tokens"] = min(thought_bounds, key=thought_bounds.__getitem__)
        is_bounded = bool(bounds) and (self.budget is None or self.budget.tokens is None)
        return names | ({"budget.tokens": min(bounds, key=bounds.__getitem__)} if is_bounded else {})

    def to_job(self, conversation: list[Message], settings: Settings, served: Sequence[ModelInfo]) -> JobRequest:
        """Return the job for a conversation. The token bounds also limit the tokens of an effort.

        ``served``: the models that are known to be served. Raises ``ValidationError`` that names the job's field, or
        ``Problem`` that names the request's.
        """
        effort = self._find_effort(settings.effort)
        thinking_tokens = min(self.thought_bounds().values(), default=None)
        limits = {"effort": effort, "thinking_tokens": thinking_tokens}
        budget = (self.budget or Budget()).model_copy(update=limits)
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": conversation,
            "seed": self.seed,
            "stop": self.stop_strings(),
            "budget": None if budget == Budget() else budget,
            "sampling": {name: value for name, value in self.sampling().items() if value is not None},
            "metadata": self.job_metadata(),
            **{name: getattr(self, name) for name in _JOB_FIELDS},
            **self.more_job_fields(),
        }
        if (constraint := self.format_constraint()) is not None:
            fields["constraint"] = constraint
        tools, fields["tool_choice"] = self.job_tools()
        fields["tools"] = tools or None
        compares = self._compares_answers(settings, served)
        if not compares and fields["constraint"] is None:
            fields["answer"] = AnswerSpec(compare="text", extract="all")
        job = JobRequest.model_validate({name: value for name, value in fields.items() if value not in (None, {})})
        verifier = merge_sources(Submission.to_service(job, settings, served)).spec.verifier
        if not compares and verifier is None:  # nothing could choose among several
            samples = StrategySpec.model_validate({"name": FALLBACK_STRATEGY, "n": job.alternatives + 1})
            job = job.model_copy(update={"strategy": samples})
        return _apply_bounds(job, list(self.token_bounds().values()), settings, served)

    def _compares_answers(self, settings: Settings, served: Sequence[ModelInfo]) -> bool:
        """Return True if the client, its effort or the operator says how answers are found, compared or searched for.

        Otherwise the request is a conversation, whose solutions are chosen as whole texts.
        """
        try:
            name = find_name(self.model, settings, [info.id for info in served])
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

    def _find_effort(self, efforts: Mapping[str, Effort]) -> str | None:
        given = self.efforts()
        for field, name in given.items():
            if name not in efforts:
                raise refuse_field(field, f"there is no effort {name!r}; known are {', '.join(efforts)}")
        if len(set(given.values())) > 1:
            raise refuse_field(min(given), f"{' and '.join(given)} contradict each other: give one of them")
        return next(iter(given.values()), None)


def _apply_bounds(job: JobRequest, bounds: list[int], settings: Settings, served: Sequence[ModelInfo]) -> JobRequest:
    """Return the job with a token budget of at most the smallest bound.

    An effort with a larger one is replaced by its other limits and its strategy. A smaller one of a name stays.
    """
    if not bounds:
        return job
    if (contradiction := find_contradiction(job.budget, settings.effort)) is not None:
        field = contradiction.field or "budget"
        raise refuse_field(field, str(contradiction).removeprefix(f"{field}: "))
    changes: dict[str, Any] = {}
    budget = job.budget
    submission = Submission.to_service(job, settings, served)
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
