"""The messages of a request and the blocks of their content."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from api.anthropic.unsupported import BLOCKS, refuse_types
from api.conversation.unsupported import Neutral
from reasoner.base_model import StrictModel, read_type
from reasoner.jobs.messages import MAX_MESSAGES, MAX_PROBLEM_CHARS, CallId, FunctionName


class TextBlock(StrictModel):
    """A text."""

    type: Literal["text"]
    text: Annotated[str, Field(max_length=MAX_PROBLEM_CHARS)]
    cache_control: Neutral = None
    citations: Neutral = None
    parsed_output: Neutral = None


class ThinkingBlock(StrictModel):
    """A thought of an earlier turn, with any signature. The model does not see it again."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: Neutral = None


class RedactedThinkingBlock(StrictModel):
    """A thought that its service has encrypted. The model does not see it."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: Neutral = None


class ToolUseBlock(StrictModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: dict[str, Any]
    caller: Neutral = None
    toolset_name: None = None
    cache_control: Neutral = None


def _wrap_string(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _refuse_block(value: Any) -> Any:
    return refuse_types(value, BLOCKS, "block")


_KNOWN_BLOCKS = "text, thinking, redacted_thinking, tool_use and tool_result"
_Plain = Annotated[str, Field(max_length=MAX_PROBLEM_CHARS)]
_ResultBlock = Annotated[TextBlock, BeforeValidator(_refuse_block)]
_TextBlocks = Annotated[list[_ResultBlock], Field(max_length=MAX_MESSAGES)]
Texts = Annotated[_TextBlocks, BeforeValidator(_wrap_string, json_schema_input_type=_Plain | _TextBlocks)]
"""A text, or text blocks."""


class ToolResultBlock(StrictModel):
    """The result of a call. One with ``is_error`` is shown to the model as an error."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Texts = Field(default_factory=list)
    is_error: bool | None = None
    toolset_name: None = None
    cache_control: Neutral = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        read_type,
        custom_error_type="block_type",
        custom_error_message=f"there is no such type of block; known are {_KNOWN_BLOCKS}",
    ),
]
_Blocks = Annotated[list[Annotated[Block, BeforeValidator(_refuse_block)]], Field(max_length=MAX_MESSAGES)]


class InputMessage(StrictModel):
    """A turn, whose content is a text or blocks. Messages of any service may be sent back unchanged."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[_Blocks, BeforeValidator(_wrap_string, json_schema_input_type=_Plain | _Blocks)]


def join_texts(blocks: list[TextBlock]) -> str:
    """Return the texts of blocks, joined by line breaks."""
    return "\n".join(block.text for block in blocks if block.text)
