"""The body of ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from api.conversation.request import Tokens
from api.conversation.sent_fields import Turn, naming_field
from api.conversation.thoughts import strip_thoughts
from api.conversation.unsupported import Neutral, remove_neutral_fields
from api.openai.content import Text
from api.openai.formats import TextSettings, to_constraint
from api.openai.functions import Plain, ResponseNamedChoice, ResponseTool, to_tool_choice, to_tools
from api.openai.request import OpenAIRequest, Summary
from api.openai.unsupported import IGNORED, RESPONSES
from reasoner.base_model import StrictModel
from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.messages import (
    MAX_MESSAGES,
    MAX_PROBLEM_CHARS,
    CalledFunction,
    CallId,
    FunctionName,
    Message,
    MessageCall,
)
from reasoner.jobs.tool_specs import MAX_TOOLS, FunctionTool, PythonTool, ToolChoice


class InputMessage(StrictModel):
    """A turn. Messages of any service's responses may be sent back unchanged; the model does not see their thoughts."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Neutral = None
    name: Neutral = None
    cache_control: Neutral = None

    def to_message(self) -> Message:
        role: Any = "system" if self.role == "developer" else self.role
        return Message(role=role, content=strip_thoughts(self.content) if role == "assistant" else self.content)


class InputCall(StrictModel):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: Annotated[str, Field(max_length=MAX_PROBLEM_CHARS)]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    namespace: None = None
    caller: Neutral = None
    parsed_arguments: Neutral = None
    cache_control: Neutral = None

    def to_call(self) -> MessageCall:
        return MessageCall(id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments))


class InputOutput(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Text
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    namespace: None = None
    name: Neutral = None
    caller: Neutral = None
    cache_control: Neutral = None

    def to_message(self) -> Message:
        return Message(role="tool", content=self.output, tool_call_id=self.call_id)


class SummaryText(StrictModel):
    type: Literal["summary_text"]
    text: str


class InputReasoning(StrictModel):
    """The reasoning item of an earlier response, which the model does not see."""

    type: Literal["reasoning"]
    summary: Neutral = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    content: Neutral = None
    encrypted_content: Neutral = None


class ItemReference(StrictModel):
    """An item of an earlier response, or of its input, by its id."""

    type: Literal["item_reference"] | None = None
    id: Annotated[str, Field(min_length=1, max_length=128)]


def _item_type(item: Any) -> str:
    if not isinstance(item, dict):
        return str(getattr(item, "type", "message"))
    if item.get("type") is None:
        return "item_reference" if "id" in item and "role" not in item else "message"
    return str(item["type"])


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputOutput, Tag("function_call_output")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(
        _item_type,
        custom_error_type="input_kind",
        custom_error_message="there is no such input type; known are message, reasoning, item_reference, "
        "function_call and function_call_output",
    ),
]


def _wrap_string(value: Any) -> Any:
    if value == "":
        raise ValueError("it is empty: write the question")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Plain = Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)]
_Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
Input = Annotated[_Items, BeforeValidator(_wrap_string, json_schema_input_type=_Plain | _Items)]


def read_turns(items: Sequence[InputItem]) -> list[Turn]:
    """Return the messages of items: calls that follow each other, or a text of the assistant, are one message.

    Raises ``RequestValidationError`` that names the item of which no message can be made.
    """
    turns: list[Turn] = []
    for index, item in enumerate(items):
        with naming_field(f"input.{index}"):
            previous = turns[-1] if turns and turns[-1].message.role == "assistant" else None
            match item:
                case InputCall() if previous is not None:
                    calls = [*previous.message.tool_calls, item.to_call()]
                    turns[-1] = replace(previous, message=previous.message.model_copy(update={"tool_calls": calls}))
                case InputCall():
                    turns.append(Turn(f"input.{index}", Message(role="assistant", tool_calls=[item.to_call()])))
                case InputMessage(role="assistant", content=content) if content and not strip_thoughts(content):
                    pass  # some clients send a thought as a message of its own
                case InputMessage(role="assistant") if previous is not None and previous.message.tool_calls:
                    texts = previous.message.content, item.to_message().content
                    changes = {"content": "\n".join(text for text in texts if text)}
                    turns[-1] = replace(previous, message=previous.message.model_copy(update=changes))
                case InputMessage() | InputOutput():
                    turns.append(Turn(f"input.{index}", item.to_message()))
    return turns


class ResponseStreamOptions(StrictModel):
    include_obfuscation: Literal[False] | None = None


class EchoedFields(StrictModel):
    """Fields of the request that are not part of the job, stored beside it to be repeated in the response."""

    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    effort: str | None = None
    summary: Summary = "auto"
    previous_response_id: str | None = None
    format: dict[str, Any] | None = None


class ResponseBody(OpenAIRequest):
    """The fields of OpenAI's Responses, and those of ``OpenAIRequest``."""

    input: Input
    instructions: Annotated[str, Field(max_length=MAX_PROBLEM_CHARS)] | None = Field(
        None, description="A system message before the input."
    )
    max_output_tokens: Tokens | None = Field(None, description="Bounds the job's tokens.")
    previous_response_id: str | None = Field(
        None, description="A completed response whose conversation is continued, without its instructions."
    )
    background: bool | None = Field(None, description="Respond at once; the job runs without its client.")
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="Functions that an answer may call, and 'python', which solutions may run while they reason.",
    )
    tool_choice: Plain | ResponseNamedChoice | None = None
    text: TextSettings | None = Field(
        None, description="Its format holds the answer, after its thought, to JSON or to a JSON Schema, token by token."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return remove_neutral_fields(body, RESPONSES, IGNORED)

    def to_turns(self, history: Sequence[Message], items: Sequence[InputItem]) -> list[Turn]:
        """Return the conversation for the model: instructions, earlier turns and the items of the input."""
        head = (
            []
            if self.instructions is None
            else [Turn("instructions", Message(role="system", content=self.instructions))]
        )
        return [*head, *(Turn("previous_response_id", message) for message in history), *read_turns(items)]

    def sent_fields(self, turns: Sequence[Turn]) -> dict[str, str]:
        names = super().sent_fields(turns) | {"problem": "input", "messages": "input"}
        names |= {f"messages.{index}.tool_call_id": f"{turn.field}.call_id" for index, turn in enumerate(turns)}
        names |= {f"messages.{index}.tool_calls": turn.field for index, turn in enumerate(turns)}
        if self.format_constraint() is not None:
            names |= {"constraint": "text.format", "constraint.json_schema": "text.format.schema"}
        return names

    def job_tools(self) -> tuple[list[PythonTool | FunctionTool], ToolChoice | None]:
        return to_tools(self.tools), to_tool_choice(self.tool_choice)

    def format_constraint(self) -> ConstraintSpec | None:
        return to_constraint(None if self.text is None else self.text.format)

    def token_bounds(self) -> dict[str, int]:
        own = {} if self.max_output_tokens is None else {"max_output_tokens": self.max_output_tokens}
        return own | super().token_bounds()

    @property
    def echoed_fields(self) -> EchoedFields:
        """The fields to store beside the job."""
        return EchoedFields(
            background=bool(self.background),
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            effort=next(iter(self.efforts().values()), None),
            summary=(self.reasoning and (self.reasoning.summary or self.reasoning.generate_summary)) or "auto",
            previous_response_id=self.previous_response_id,
            format=self._dump_format(),
        )

    def _dump_format(self) -> dict[str, Any] | None:
        """Return the answer's format as the request gives it."""
        given = None if self.text is None else self.text.format
        return None if given is None else given.model_dump(by_alias=True, exclude_none=True)
