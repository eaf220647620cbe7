"""Texts as OpenAI's clients send them: plain, or in parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from reasoner.base_model import StrictModel
from reasoner.jobs.spec import MAX_PROBLEM_CHARS

Nothing = Annotated[list[Any], Field(max_length=0)] | None
"""For what a client sends back as it got it."""


class TextPart(StrictModel):
    """A part of a text. There are no parts of other kinds: neither images, nor sound, nor files."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Nothing = None
    logprobs: Nothing = None


_Parts = Annotated[list[TextPart], Field(max_length=1000)]
_PARTS: TypeAdapter[list[TextPart]] = TypeAdapter(_Parts)


def _joined(value: Any) -> Any:
    return "\n".join(part.text for part in _PARTS.validate_python(value)) if isinstance(value, list) else value


_Plain = Annotated[str, Field(min_length=1, max_length=MAX_PROBLEM_CHARS)]
Text = Annotated[_Plain, BeforeValidator(_joined, json_schema_input_type=_Plain | _Parts)]
"""Parts are lines of one text."""
