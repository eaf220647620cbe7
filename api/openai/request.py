"""The request fields that both OpenAI routes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from api.conversation.request import ConversationRequest, Tokens
from api.conversation.sent_fields import Turn
from reasoner.base_model import StrictModel
from reasoner.jobs.spec import StopStrings

Summary = Literal["auto", "concise", "detailed"]


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


class OpenAIRequest(ConversationRequest):
    """OpenAI's fields that both routes take. Those that are not OpenAI's are as in ``POST /v1/jobs``."""

    stop: Annotated[StopStrings, BeforeValidator(_to_list)] | None = Field(
        None, description="One text, or several, that end each solution and are left out of it."
    )
    metadata: dict[str, str] | None = None
    user: str | None = Field(None, description="Becomes metadata.user.")
    safety_identifier: str | None = Field(None, description="Becomes metadata.safety_identifier.")
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_metadata_conflicts(self) -> Self:
        for name in self._user_metadata():
            if name in (self.metadata or {}):
                raise ValueError(f"give either the field {name!r} or {name!r} in 'metadata', not both")
        return self

    def efforts(self) -> dict[str, str]:
        own = self.reasoning.effort if self.reasoning else None
        return ({} if own is None else {"reasoning.effort": own}) | super().efforts()

    def job_metadata(self) -> dict[str, str]:
        return {**(self.metadata or {}), **self._user_metadata()}

    def stop_strings(self) -> list[str] | None:
        return self.stop

    def more_job_fields(self) -> dict[str, Any]:
        return {"parallel_tool_calls": self.parallel_tool_calls}

    def token_bounds(self) -> dict[str, int]:
        given = {
            "reasoning.max_tokens": self.reasoning.max_tokens if self.reasoning else None,
            "thinking.budget_tokens": self.thinking.budget_tokens if self.thinking else None,
        }
        return {field: tokens for field, tokens in given.items() if tokens is not None}

    def sent_fields(self, turns: Sequence[Turn]) -> dict[str, str]:
        return super().sent_fields(turns) | {f"metadata.{name}": name for name in self._user_metadata()}

    def _user_metadata(self) -> dict[str, str]:
        fields = {"user": self.user, "safety_identifier": self.safety_identifier}
        return {name: value for name, value in fields.items() if value is not None}
