"""The input items of a response: the turns of its conversation, without its instructions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from api.openai.responses.body import EchoedFields
from reasoner.base_model import StrictModel
from reasoner.jobs.spec import JobSpec
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


class InputItems(BaseModel):
    """``last_id`` is what ``after`` takes to get the next page."""

    object: Literal["list"] = "list"
    data: list[InputTurn]
    first_id: str | None
    last_id: str | None
    has_more: bool


def list_input_items(job: JobDocument, echoed: EchoedFields, query: ListItems) -> InputItems:
    """Return a page of input items. Raises ``KeyError`` if there is no item ``query.after``."""
    turns = JobSpec.model_validate(job["spec"]).conversation[echoed.instructions is not None :]
    items = [_build_item(job["id"], index, turn) for index, turn in enumerate(turns)]
    if query.order == "desc":
        items.reverse()
    start = 0
    if query.after is not None:
        start = {item.id: position for position, item in enumerate(items, start=1)}[query.after]
    page = items[start : start + query.limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return InputItems(data=page, first_id=first, last_id=last, has_more=len(items) > start + len(page))


def _build_item(job_id: str, index: int, turn: dict[str, str]) -> InputTurn:
    kind = "output_text" if turn["role"] == "assistant" else "input_text"
    return InputTurn.model_validate(
        {
            "id": f"msg_{job_id.removeprefix('job_')}_{index}",
            "role": turn["role"],
            "content": [{"type": kind, "text": turn["content"]}],
        }
    )
