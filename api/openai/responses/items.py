"""The input items of a response: the turns of its conversation, without its instructions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from api.openai.functions import FunctionCallItem, FunctionOutputItem
from api.openai.responses.body import EchoedFields
from reasoner.base_model import StrictModel
from reasoner.jobs.spec import read_conversation
from workers.store.serialization import JobDocument


class ListItems(StrictModel):
    """Query parameters of a page of input items."""

    after: Annotated[str, Field(max_length=128)] | None = Field(None, description="The 'last_id' of the page before.")
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class InputText(BaseModel):
    type: Literal["input_text", "output_text"]
    text: str


class InputTurn(BaseModel):
    """A turn of the conversation."""

    id: str
    type: Literal["message"] = "message"
    status: Literal["completed"] = "completed"
    role: Literal["system", "user", "assistant"]
    content: list[InputText]


InputItem = InputTurn | FunctionCallItem | FunctionOutputItem


class InputItems(BaseModel):
    """``last_id`` is what ``after`` takes to get the next page."""

    object: Literal["list"] = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


def list_input_items(job: JobDocument, echoed: EchoedFields, query: ListItems) -> InputItems:
    """Return a page of input items. Raises ``KeyError`` if there is no item ``query.after``."""
    items = list_items(job, echoed)
    if query.order == "desc":
        items.reverse()
    start = 0
    if query.after is not None:
        start = {item.id: position for position, item in enumerate(items, start=1)}[query.after]
    page = items[start : start + query.limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return InputItems(data=page, first_id=first, last_id=last, has_more=len(items) > start + len(page))


def list_items(job: JobDocument, echoed: EchoedFields) -> list[InputItem]:
    """Return all input items, oldest first."""
    turns = read_conversation(job["spec"])[echoed.instructions is not None :]
    return [item for index, turn in enumerate(turns) for item in _build_items(job["id"], index, turn)]


def _build_items(job_id: str, index: int, turn: dict[str, Any]) -> list[InputItem]:
    """Return the items of a message: its text, the calls that it makes, or the result that it is."""
    end = f"{job_id.removeprefix('job_')}_{index}"
    if turn["role"] == "tool":
        output = turn["content"] or ""
        return [FunctionOutputItem(id=f"fco_{end}", call_id=turn["tool_call_id"], output=output)]
    items: list[InputItem] = []
    if turn["content"]:
        kind: Literal["input_text", "output_text"] = "output_text" if turn["role"] == "assistant" else "input_text"
        content = [InputText(type=kind, text=turn["content"])]
        items.append(InputTurn(id=f"msg_{end}", role=turn["role"], content=content))
    for number, call in enumerate(turn.get("tool_calls", ())):
        function = call["function"]
        items.append(FunctionCallItem(id=f"fc_{end}_{number}", call_id=call["id"], **function))
    return items
