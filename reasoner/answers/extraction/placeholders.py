r"""Texts in the place of an answer that are none: an empty box, ``\boxed{?}``, a quoted ``\boxed{answer}``."""

from __future__ import annotations

import re

_COMMANDS = re.compile(r"\\(?:f?boxed|fbox|framebox|text|textbf|mathrm|mbox|mathbf)(?![A-Za-z])\s*")
MAX_CHARS = 80
_NOTHING = re.compile(
    r"(?:[\s?_.,;:!$~*\u2026{}\[\]()<>\"'`-]|\\(?:[ ,;:!]|quad|qquad|[lcd]?dots|square|Box|underline|phantom|hspace|_)"
    r"|\\\\|\\$)*"
)
_NAMES = re.compile(
    r"[\[<(\"'`{]*(?:(?:insert|write|put|enter)\s+)?(?:(?:the|your|my|final|correct|short|numerical)\s+)*"
    r"(?:answer|result|solution)(?:\s+(?:here|goes here))?[\]>)\"'`}.]*",
    re.IGNORECASE,
)


def is_placeholder(content: str) -> bool:
    """Return True if a stated answer is empty, a question mark, dots, or only names what belongs there."""
    content = _COMMANDS.sub("", content).strip().strip("$").strip()
    if len(content) > MAX_CHARS:
        return False
    is_empty_set = re.fullmatch(r"\\\{\s*\\\}", content) is not None
    return _NAMES.fullmatch(content) is not None or (_NOTHING.fullmatch(content) is not None and not is_empty_set)
