"""Models in the format of Anthropic's clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from fastapi import Header
from pydantic import BaseModel, Field

from api.http.problems import Problem

AnthropicVersion = Annotated[
    str | None, Header(description="Sent by Anthropic's clients: the answer then has their format.")
]


class ModelPage(BaseModel):
    """Query parameters of a list of models, which Anthropic's clients send."""

    after_id: str | None = Field(None, description="Those after this one.")
    before_id: str | None = Field(None, description="Those before this one.")
    limit: Annotated[int, Field(ge=1, le=1000, description="At most so many; without it all.")] | None = None


class AnthropicModel(BaseModel):
    """Anthropic's model object."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None

    @classmethod
    def from_listed(cls, listed: Mapping[str, Any]) -> Self:
        """Return the object of a model as ``GET /v1/models`` lists it."""
        created, context = datetime.fromtimestamp(listed["created"], UTC), listed.get("context")
        return cls(
            id=listed["id"],
            display_name=listed.get("description") or listed["id"],
            created_at=created.isoformat(),
            max_input_tokens=context,
            max_tokens=context,
        )


class AnthropicModels(BaseModel):
    """A page of models. ``first_id`` and ``last_id`` are where the pages before and after it begin."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def list_page(listed: Sequence[Mapping[str, Any]], page: ModelPage) -> AnthropicModels:
    """Return a page of models. Raises ``Problem`` for a place that no model has."""
    names = [model["id"] for model in listed]
    for field, name in (("after_id", page.after_id), ("before_id", page.before_id)):
        if name is not None and name not in names:
            message = f"there is no model {name!r}; served are {', '.join(names) or 'none'}"
            raise Problem(404, "unknown-model", f"{field}: {message}", errors=[(field, message)])
    start = 0 if page.after_id is None else names.index(page.after_id) + 1
    end = len(names) if page.before_id is None else names.index(page.before_id)
    within = list(listed[start:end])
    shown = within[: page.limit] if page.before_id is None else within[-(page.limit or len(within)) :]
    ids = [model["id"] for model in shown]
    return AnthropicModels(
        data=[AnthropicModel.from_listed(model) for model in shown],
        has_more=len(shown) < len(within),
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
    )
