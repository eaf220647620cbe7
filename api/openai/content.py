"""Message contents of OpenAI's clients: a string, or a list of parts that are text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, field_validator

from api.conversation.unsupported import Neutral
from reasoner.base_model import StrictModel, read_type
from reasoner.jobs.messages import MAX_PROBLEM_CHARS

_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image"), "images"),
    **dict.fromkeys(("input_audio", "audio", "audio_url"), "sounds"),
    **dict.fromkeys(("video_url", "input_video", "video"), "videos"),
    **dict.fromkeys(("file", "input_file"), "files"),
}
"""The content of parts of other kinds, by their type."""


class TextPart(StrictModel):
    """A text part. Images, sound and files are not supported."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Neutral = None
    logprobs: Neutral = None
    cache_control: Neutral = None
    prompt_cache_breakpoint: Neutral = None
    id: Neutral = None
    index: Neutral = None

    @field_validator("type", mode="before")
    @classmethod
    def _refuse_media(cls, kind: Any) -> Any:
        medium = _MEDIA.get(kind) if isinstance(kind, str) else None
        if medium is not None:
            raise ValueError(f"{medium} are not supported; parts are 'text', 'input_text' or 'output_text'")
        return kind


class RefusalPart(StrictModel):
    """An answer that declines, which is a text of the assistant like any other."""

    type: Literal["refusal"]
    refusal: str


_Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")],
    Discriminator(lambda part: "refusal" if read_type(part) == "refusal" else "text"),
]
_Parts = Annotated[list[_Part], Field(max_length=1000)]
_PARTS: TypeAdapter[list[TextPart | RefusalPart]] = TypeAdapter(_Parts)


def _join_parts(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    texts = [part.text if isinstance(part, TextPart) else part.refusal for part in _PARTS.validate_python(value)]
    return "\n".join(text for text in texts if text)


_Plain = Annotated[str, Field(max_length=MAX_PROBLEM_CHARS)]
Text = Annotated[_Plain, BeforeValidator(_join_parts, json_schema_input_type=_Plain | _Parts)]
"""A text, which may be empty; parts are joined by line breaks."""
