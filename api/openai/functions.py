"""Tools of OpenAI's requests, and the calls of functions that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag

from api.conversation.calls import make_call_id
from reasoner.base_model import StrictModel, read_type
from reasoner.jobs.messages import CalledFunction, FunctionName
from reasoner.jobs.tool_specs import FunctionTool, NamedChoice, PythonTool, ToolChoice

Plain = Literal["auto", "none", "required"]


class ChatFunction(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatFunctionTool(StrictModel):
    """A function, as Chat Completions nests it."""

    type: Literal["function"]
    function: ChatFunction


class CodeInterpreter(StrictModel):
    """OpenAI's tool for Python, which runs in this service's own sandbox, without files or network."""

    type: Literal["code_interpreter"]
    container: Any = None


_BY_TYPE = Discriminator(
    read_type,
    custom_error_type="tool_type",
    custom_error_message="there is no such type of tool; known are function, python and code_interpreter",
)
_Python = Annotated[PythonTool, Tag("python")] | Annotated[CodeInterpreter, Tag("code_interpreter")]
ChatTool = Annotated[_Python | Annotated[ChatFunctionTool, Tag("function")], _BY_TYPE]
ResponseTool = Annotated[_Python | Annotated[FunctionTool, Tag("function")], _BY_TYPE]


class ChatNamedChoice(StrictModel):
    type: Literal["function"]
    function: NamedChoice


class ResponseNamedChoice(StrictModel):
    type: Literal["function"]
    name: FunctionName


def to_tools(tools: Sequence[ChatTool | ResponseTool] | None) -> list[PythonTool | FunctionTool]:
    """Return the tools of the job."""
    return [_to_tool(tool) for tool in tools or ()]


def to_tool_choice(choice: Plain | ChatNamedChoice | ResponseNamedChoice | None) -> ToolChoice | None:
    """Return the job's choice among its tools; ``None`` if the request leaves it open."""
    match choice:
        case ChatNamedChoice(function=named):
            return named
        case ResponseNamedChoice(name=name):
            return NamedChoice(name=name)
        case _:
            return choice


def _to_tool(tool: ChatTool | ResponseTool) -> PythonTool | FunctionTool:
    match tool:
        case CodeInterpreter():
            return PythonTool(type="python")
        case ChatFunctionTool(function=function):
            return FunctionTool(type="function", **function.model_dump(exclude_none=True))
        case _:
            return tool


class AnswerCall(BaseModel):
    """A call of a function in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionCallItem(BaseModel):
    """A call of a function as an item of a response."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Literal["in_progress", "completed"] = "completed"
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(BaseModel):
    """The result of a call, as an item of a response's input."""

    id: str
    type: Literal["function_call_output"] = "function_call_output"
    status: Literal["completed"] = "completed"
    call_id: str
    output: str


def build_calls(job_id: str, calls: Sequence[CalledFunction], choice: int = 0) -> list[AnswerCall]:
    """Return the calls of one of an answer's choices, with their ids."""
    return [AnswerCall(id=make_call_id(job_id, index, choice), function=call) for index, call in enumerate(calls)]


def build_call_item(job_id: str, index: int, call: CalledFunction) -> FunctionCallItem:
    """Return one of an answer's calls as an item of a response."""
    name = f"fc_{job_id.removeprefix('job_')}_{index}"
    return FunctionCallItem(id=name, call_id=make_call_id(job_id, index), name=call.name, arguments=call.arguments)
