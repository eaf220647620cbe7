"""The bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from api.anthropic.content import InputMessage, Texts
from api.anthropic.tools import Choice, Tool, to_tool_choice, to_tools
from api.anthropic.turns import read_turns
from api.anthropic.unsupported import FIELDS, IGNORED
from api.conversation.narration import ReasoningContent
from api.conversation.request import ConversationRequest, Tokens
from api.conversation.sent_fields import Turn
from api.conversation.unsupported import remove_neutral_fields
from reasoner.base_model import StrictModel, read_type
from reasoner.budget.spec import Budget
from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.messages import MAX_MESSAGES
from reasoner.jobs.sampling_spec import MAX_TOP_K
from reasoner.jobs.spec import StopStrings
from reasoner.jobs.tool_specs import MAX_TOOLS, FunctionTool, PythonTool, ToolChoice

Display = Literal["summarized", "omitted"]


class EnabledThinking(StrictModel):
    """Thinking with a limit, shown as a block."""

    type: Literal["enabled"]
    budget_tokens: Annotated[Tokens, Field(description="Bounds the thought of each solution, if the model thinks.")]
    display: Display | None = None


class AdaptiveThinking(StrictModel):
    """Thinking as long as the model likes, shown as a block."""

    type: Literal["adaptive"]
    display: Display | None = None


class DisabledThinking(StrictModel):
    """No thinking: the thought of each solution is closed at once, if the model thinks."""

    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[EnabledThinking, Tag("enabled")]
    | Annotated[AdaptiveThinking, Tag("adaptive")]
    | Annotated[DisabledThinking, Tag("disabled")],
    Discriminator(
        read_type,
        custom_error_type="thinking_type",
        custom_error_message="there is no such type of thinking; known are enabled, adaptive and disabled",
    ),
]


class SchemaFormat(StrictModel):
    """A JSON Schema to which the answer is held, token by token."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """The effort of the search, and the format of its answer."""

    effort: str | None = Field(None, description="A budget and a strategy by name: low, medium, high, xhigh, max, …")
    format: SchemaFormat | None = None


class TokenCountBody(ConversationRequest):
    """The fields of Anthropic's count of tokens, and those of ``ConversationRequest``."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = Field(default_factory=list, description="The system message.")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list,
        description="Functions that an answer may call, and 'python', which solutions may run while they reason.",
    )
    tool_choice: Choice | None = None
    thinking: Thinking | None = Field(
        None, description="Without it the model thinks as it likes, and no thinking is shown."
    )
    output_config: OutputConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return remove_neutral_fields(body, FIELDS, IGNORED)

    def to_turns(self) -> list[Turn]:
        """Return the conversation for the model."""
        return read_turns(self.system, self.messages)

    def sent_fields(self, turns: Sequence[Turn]) -> dict[str, str]:
        names = {"problem": "messages"} | super().sent_fields(turns)
        names |= {f"messages.{index}.tool_call_id": f"{turn.field}.tool_use_id" for index, turn in enumerate(turns)}
        names |= {f"messages.{index}.tool_calls": f"{turn.field}.content" for index, turn in enumerate(turns)}
        names |= {"stop": "stop_sequences", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use"}
        if self.format_constraint() is not None:
            names |= {
                "constraint": "output_config.format",
                "constraint.json_schema": "output_config.format.schema",
            }
        return names

    def job_tools(self) -> tuple[list[PythonTool | FunctionTool], ToolChoice | None]:
        return to_tools(self.tools), to_tool_choice(self.tool_choice)

    def efforts(self) -> dict[str, str]:
        effort = None if self.output_config is None else self.output_config.effort
        return ({} if effort is None else {"output_config.effort": effort}) | super().efforts()

    def format_constraint(self) -> ConstraintSpec | None:
        answer_format = None if self.output_config is None else self.output_config.format
        return None if answer_format is None else ConstraintSpec(json_schema=answer_format.schema_)

    def thought_bounds(self) -> dict[str, int]:
        match self.thinking:
            case EnabledThinking(budget_tokens=tokens):
                own = {"thinking.budget_tokens": tokens}
            case DisabledThinking():
                own = {"thinking": 0}
            case _:
                own = {}
        return own | super().thought_bounds()

    @property
    def limits_thoughts(self) -> bool:
        """True if ``thinking`` limits the thought of each solution."""
        return isinstance(self.thinking, EnabledThinking | DisabledThinking)

    def lift_thought_limit(self, budget: Budget) -> Budget:
        """Return the budget of the job without the limit of ``thinking``, for a model that does not think."""
        own = None if self.budget is None else self.budget.thinking_tokens
        return budget.model_copy(update={"thinking_tokens": own})

    def more_job_fields(self) -> dict[str, Any]:
        is_single = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        return {"parallel_tool_calls": False} if is_single else {}


class MessagesBody(TokenCountBody):
    """The fields of Anthropic's Messages, and those of ``ConversationRequest``."""

    max_tokens: Annotated[Tokens, Field(description="Bounds the job's tokens, the verifier's included.")]
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] | None = None
    stop_sequences: StopStrings | None = Field(None, description="Texts that end each solution and are left out of it.")
    metadata: dict[str, str | None] | None = Field(None, description="Anthropic's user_id, and any other names.")
    reasoning_content: ReasoningContent | None = Field(
        None,
        description="Text of the thinking block: the thought of the chosen solution, or the narration of the search. "
        "By default the thought if the model thinks.",
    )

    @model_validator(mode="after")
    def _check_thinking_fits(self) -> Self:
        limit = self.thinking.budget_tokens if isinstance(self.thinking, EnabledThinking) else 0
        if limit >= self.max_tokens:
            raise ValueError(
                f"thinking.budget_tokens: a thought of {limit} tokens leaves nothing of max_tokens "
                f"({self.max_tokens}) for an answer: give a smaller budget_tokens, or more max_tokens"
            )
        return self

    def job_metadata(self) -> dict[str, str]:
        return {name: value for name, value in (self.metadata or {}).items() if value is not None}

    def stop_strings(self) -> list[str] | None:
        return self.stop_sequences

    def sampling(self) -> dict[str, float | None]:
        return super().sampling() | {"top_k": self.top_k}

    def token_bounds(self) -> dict[str, int]:
        return {"max_tokens": self.max_tokens}

    @property
    def display(self) -> Display | None:
        """The form in which thinking is shown; ``None``: no block of it."""
        match self.thinking:
            case EnabledThinking(display=display) | AdaptiveThinking(display=display):
                return display or "summarized"
            case _:
                return None
