"""Message contents of OpenAI's clients: a string, or a list of text parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from reasoner.base_model import StrictModel
from reasoner.jobs.messages import MAX_PROBLEM_CHARS

EmptyList = Annotated[list[Any], Field(max_length=0)] | None
"""A list that must be empty or null: fields that clients send back as they got them."""


class TextPart(StrictModel):
    """A text part. Images, sound and files are not supported."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: EmptyList = None
    logprobs: EmptyList = None


_Parts = Annotated[list[TextPart], Field(max_length=1000)]
_PARTS: TypeAdapter[list[TextPart]] = TypeAdapter(_Parts)


def _join_parts(value: Any) -> Any:
    return "\n".join(part.text for part in _PARTS.validate_python(value)) if isinstance(value, list) else value


_Plain = Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)]
Text = Annotated[_Plain, BeforeValidator(_join_parts, json_schema_input_type=_Plain | _Parts)]
"""A text; parts are joined by line breaks."""
