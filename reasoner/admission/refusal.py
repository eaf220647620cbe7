"""The refusal of a job."""

from __future__ import annotations


class JobRefused(Exception):
    """A job that cannot run as it was submitted."""

    def __init__(self, code: str, field: str | None, message: str) -> None:
        """``code`` is the stable name of the error; ``field`` is ``None`` if the fault is not in a single field."""
        super().__init__(message if field is None or message.startswith(field) else f"{field}: {message}")
        self.code = code
        self.field = field
        self.message = message
