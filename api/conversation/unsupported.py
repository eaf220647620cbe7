"""Fields that this service does not have: ignored where they change no answer, else refused by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

Neutral = Any
"""Type of a field that clients send and that changes no answer: it is accepted with any value, and not read."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """``neutral`` are the values, beside null, that have no effect; ``instead`` names the alternative."""

    neutral: tuple[Any, ...]
    instead: str
    takes: Callable[[Any], bool] = lambda _: False
    """True for further values that have no effect."""


def remove_neutral_fields(body: Any, unsupported: Mapping[str, Unsupported], ignored: Collection[str]) -> Any:
    """Return the body without the fields that are ignored, and without those that are unsupported.

    Raises ``ValidationError`` for unsupported fields whose value is not neutral.
    """
    if not isinstance(body, dict):
        return body
    errors = [
        InitErrorDetails(
            type=PydanticCustomError("unsupported", "not supported: {instead}", {"instead": field.instead}),
            loc=(name,),
            input=body[name],
        )
        for name, field in unsupported.items()
        if body.get(name) is not None and body[name] not in field.neutral and not field.takes(body[name])
    ]
    if errors:
        raise ValidationError.from_exception_data("body", errors)
    return {name: value for name, value in body.items() if name not in unsupported and name not in ignored}
