"""Tools of Anthropic's requests as those of jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from api.anthropic.unsupported import TOOLS, refuse_types
from api.conversation.sent_fields import naming_sent_fields
from api.conversation.unsupported import Neutral
from reasoner.base_model import StrictModel, read_type
from reasoner.jobs.messages import FunctionName
from reasoner.jobs.tool_specs import FunctionTool, NamedChoice, PythonTool, ToolChoice

MAX_EXAMPLES = 100


class ClientTool(StrictModel):
    """A function of the client."""

    name: str
    input_schema: dict[str, Any] = Field(description="JSON Schema of the input, which is an object.")
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="The input must be valid under the schema.")
    input_examples: list[dict[str, Any]] = Field(
        default_factory=list, max_length=MAX_EXAMPLES, description="The model reads them behind the description."
    )
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: Neutral = None
    cache_control: Neutral = None

    def to_function(self) -> FunctionTool:
        """Return the function of the job."""
        examples = "\n".join(json.dumps(example, ensure_ascii=False) for example in self.input_examples)
        texts = [self.description, f"Examples of its input:\n{examples}" if examples else None]
        return FunctionTool(
            type="function",
            name=self.name,
            description="\n\n".join(text for text in texts if text) or None,
            parameters=self.input_schema,
            strict=self.strict,
        )


def _read_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind is None else str(kind)


def _refuse_tool(value: Any) -> Any:
    return refuse_types(value, TOOLS, "tool")


_Tool = Annotated[
    Annotated[ClientTool, Tag("custom")] | Annotated[PythonTool, Tag("python")],
    Discriminator(
        _read_kind,
        custom_error_type="tool_type",
        custom_error_message="there is no such type of tool; known are custom, which needs no type, and python",
    ),
]
Tool = Annotated[_Tool, BeforeValidator(_refuse_tool)]


class AutoChoice(StrictModel):
    """The model may call tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(StrictModel):
    """The model must call a tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class OneChoice(StrictModel):
    """The tool that the model must call."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class NoChoice(StrictModel):
    """The model does not see the tools."""

    type: Literal["none"]
    disable_parallel_tool_use: bool | None = None


Choice = Annotated[
    Annotated[AutoChoice, Tag("auto")]
    | Annotated[AnyChoice, Tag("any")]
    | Annotated[OneChoice, Tag("tool")]
    | Annotated[NoChoice, Tag("none")],
    Discriminator(
        read_type,
        custom_error_type="choice_type",
        custom_error_message="there is no such choice; known are auto, any, tool and none",
    ),
]


def to_tools(tools: Sequence[ClientTool | PythonTool]) -> list[PythonTool | FunctionTool]:
    """Return the tools of the job. Errors name the field of the tool that was sent."""
    converted: list[PythonTool | FunctionTool] = []
    for index, tool in enumerate(tools):
        if isinstance(tool, PythonTool):
            converted.append(tool)
            continue
        path = f"tools.{index}"
        names = {name: f"{path}.{name}" for name in ("name", "description", "strict")}
        with naming_sent_fields(names | {"parameters": f"{path}.input_schema"}):
            converted.append(tool.to_function())
    return converted


def to_tool_choice(choice: Choice | None) -> ToolChoice | None:
    """Return the job's choice among its tools; ``None`` if the request leaves it open."""
    match choice:
        case AutoChoice():
            return "auto"
        case AnyChoice():
            return "required"
        case OneChoice(name=name):
            return NamedChoice(name=name)
        case NoChoice():
            return "none"
        case None:
            return None
