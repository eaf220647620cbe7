"""OpenAI's formats of an answer: text, a JSON object, or JSON that is valid under a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from reasoner.base_model import StrictModel, read_type
from reasoner.jobs.constraint_spec import ConstraintSpec

_Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON Schema. It is enforced whether ``strict`` or not; name and description are not shown to the model."""

    name: _Name
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ChatSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class ResponseSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


_BY_TYPE = Discriminator(
    read_type,
    custom_error_type="format_type",
    custom_error_message="there is no such format; known types are text, json_object and json_schema",
)
_Plain = Annotated[TextFormat, Tag("text")] | Annotated[JsonObjectFormat, Tag("json_object")]
ChatFormat = Annotated[_Plain | Annotated[ChatSchemaFormat, Tag("json_schema")], _BY_TYPE]
ResponseFormat = Annotated[_Plain | Annotated[ResponseSchemaFormat, Tag("json_schema")], _BY_TYPE]


class TextSettings(StrictModel):
    """``text`` of Responses."""

    format: ResponseFormat | None = None
    verbosity: Literal["medium"] | None = None


def to_constraint(answer_format: ChatFormat | ResponseFormat | None) -> ConstraintSpec | None:
    """Return the job's constraint for a format; ``None`` for text."""
    match answer_format:
        case JsonObjectFormat():
            return ConstraintSpec(json_object=True)
        case ChatSchemaFormat(json_schema=schema) | (ResponseSchemaFormat() as schema):
            return ConstraintSpec(json_schema=schema.schema_)
        case _:
            return None
