"""The tools that a model may use while it reasons."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator

from reasoner.base_model import StrictModel, read_type
from reasoner.jobs.messages import MAX_PROBLEM_CHARS, FunctionName
from reasoner.tools.calls import PYTHON_FUNCTION
from reasoner.tools.formats.registry import FORMATS

MAX_TOOLS = 128
MAX_PARAMETERS_CHARS = 65_536

BLOCKS = "blocks"
"""Name of the calls of Python that are fenced blocks alone."""
PYTHON_INSTRUCTION = (
    "You may run Python: write it in a ```python block, and what it prints follows in an ```output block."
)


def _check_call_format(name: str) -> str:
    if name != BLOCKS and name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; known are {BLOCKS}, {', '.join(FORMATS)}")
    return name


class PythonTool(StrictModel):
    """Python in the middle of a solution: a call runs when it is complete, and its output is the solution's next text.

    A call is a closed ```python block, or one of the function ``python`` in the model's own format.
    """

    type: Literal["python"]
    calls: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Calls that one solution may make; one more ends it, with the reason 'tool'."
    )
    seconds: Annotated[float, Field(gt=0, le=300)] = Field(
        10.0,
        description="Time of one call, in which the solution's earlier blocks run again. One that takes longer ends "
        "its solution, with the reason 'tool'; so do the limits of memory and of output.",
    )
    memory_mb: Annotated[int, Field(ge=128, le=8192)] = 1024
    output_chars: Annotated[int, Field(ge=100, le=32_000)] = Field(
        4000,
        description="Longest output of one call; a longer one is shortened in its middle, and 64 times as much ends "
        "the solution.",
    )
    instruction: Annotated[str, Field(min_length=1, max_length=4000)] | None = Field(
        PYTHON_INSTRUCTION,
        description="Text that is added to the system message, or is one; null: none. Without it, a model with a "
        "format of its own is shown the function 'python' by its chat template instead.",
    )
    call_format: Annotated[str, AfterValidator(_check_call_format)] | None = Field(
        None,
        description="Format of the model's own calls, which run beside ```python blocks; without it that of the field "
        "'tool_format', or of the model's chat template if it shows one; 'blocks': ```python blocks alone.",
    )

    @staticmethod
    def render() -> dict[str, Any]:
        """Return the function for a chat template, in OpenAI's form."""
        function = PYTHON_FUNCTION
        return _render(function.name, function.description, dict(function.parameters))

    @property
    def is_declared(self) -> bool:
        """True if the chat template declares it as a function."""
        return self.call_format not in (None, BLOCKS) and self.instruction == PYTHON_INSTRUCTION


class FunctionTool(StrictModel):
    """A function of the client: a solution may end with calls of it, on which solutions vote and which are returned."""

    type: Literal["function"]
    name: FunctionName
    description: Annotated[str, Field(max_length=MAX_PROBLEM_CHARS)] | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of the arguments, which are an object.")
    strict: bool | None = Field(
        None, description="Arguments must be valid under the schema; a solution with others has no answer."
    )

    @field_validator("parameters")
    @classmethod
    def _check_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        if len(json.dumps(value)) > MAX_PARAMETERS_CHARS:
            raise ValueError(f"the schema has more than {MAX_PARAMETERS_CHARS} characters")
        if value.get("type", "object") != "object":
            raise ValueError('the arguments of a function are an object: give a schema of "type": "object"')
        return value

    def render(self) -> dict[str, Any]:
        """Return the function for a chat template, in OpenAI's form."""
        return _render(self.name, self.description or "", self.parameters or {"type": "object", "properties": {}})


def _render(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


Tool = Annotated[
    Annotated[PythonTool, Tag("python")] | Annotated[FunctionTool, Tag("function")],
    Discriminator(
        read_type,
        custom_error_type="tool_type",
        custom_error_message="there is no such type of tool; known are python and function",
    ),
]


def _check_tools(tools: list[Tool]) -> list[Tool]:
    names = [tool.name if isinstance(tool, FunctionTool) else tool.type for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the tool {twice!r} is listed twice")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_check_tools)]


class NamedChoice(StrictModel):
    """The function that a solution must call."""

    name: FunctionName


ToolChoice = Literal["auto", "none", "required"] | NamedChoice
