"""What a response was asked, as OpenAI lists it: the turns of its conversation, without its instructions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from api.openai.responses.body import Form
from reasoner.base_model import StrictModel
from reasoner.jobs.spec import JobSpec
from workers.store.serialization import JobDocument


class ListItems(StrictModel):
    """Which of them."""

    after: Annotated[str, Field(max_length=128)] | None = Field(None, description="The 'last_id' of the page before.")
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class InputText(BaseModel):
    type: Literal["input_text", "output_text"]
    text: str


class InputTurn(BaseModel):
    """A turn of what a model was given."""

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


def input_items(job: JobDocument, form: Form, asked: ListItems) -> InputItems:
    """A page of them. Raises ``KeyError`` when there is no item ``asked.after``."""
    turns = JobSpec.model_validate(job["spec"]).to_messages()[form.instructions is not None :]
    items = [_item(job["id"], place, turn) for place, turn in enumerate(turns)]
    if asked.order == "desc":
        items.reverse()
    start = 0
    if asked.after is not None:
        start = {item.id: place for place, item in enumerate(items, start=1)}[asked.after]
    page = items[start : start + asked.limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return InputItems(data=page, first_id=first, last_id=last, has_more=len(items) > start + len(page))


def _item(job_id: str, place: int, turn: dict[str, str]) -> InputTurn:
    kind = "output_text" if turn["role"] == "assistant" else "input_text"
    return InputTurn.model_validate(
        {
            "id": f"msg_{job_id.removeprefix('job_')}_{place}",
            "role": turn["role"],
            "content": [{"type": kind, "text": turn["content"]}],
        }
    )
