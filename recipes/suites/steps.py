"""Text of single steps."""

from __future__ import annotations

import re

_BOXED = re.compile(r"\\boxed\{(.*)\}")


def boxed(step: str) -> str | None:
    """Return the content of a step that is one ``\\boxed{...}``, else ``None``."""
    match = _BOXED.fullmatch(step)
    return match[1] if match else None
