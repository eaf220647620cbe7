"""Constraints: the language to which a branch's text is held, token by token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

ConstraintKind = Literal["json", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language of a branch's whole text, as one text, so that equal constraints are compiled once."""

    kind: ConstraintKind
    value: str
    """``json``: a JSON Schema as JSON text. ``regex``: a regular expression that the whole text matches. ``grammar``: a
    Lark grammar whose rule ``start`` is the text. ``choice``: a JSON list of texts, one of which is the text.
    """

    def to_json(self) -> dict[str, Any]:
        """Return vLLM's object ``structured_outputs``."""
        return {self.kind: json.loads(self.value) if self.kind in ("json", "choice") else self.value}
