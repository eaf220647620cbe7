"""The reason for which a server refuses one branch for good, while others go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal in the server's own words. ``field`` names what is invalid in the request, if the server does."""

    message: str
    field: str | None = None
    is_invalid: bool = False
    """True if the request is one that can never be served."""
    is_too_long: bool = False
    """True if that is so because the question leaves no room for an answer."""

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """Return the refusal of an error (``engine.protocol.types``), of which those of requests have a field."""
        is_too_long = getattr(error, "is_too_long", False)
        return cls(str(error), getattr(error, "field", None), hasattr(error, "field"), is_too_long)
