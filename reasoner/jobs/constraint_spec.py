"""The language to which a job's solutions are held, token by token, after their thoughts."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.protocol.constraint import Constraint
from reasoner.base_model import StrictModel

MAX_CONSTRAINT_CHARS = 65_536
MAX_CHOICES = 1000
_Source = Annotated[str, Field(min_length=1, max_length=MAX_CONSTRAINT_CHARS)]
_Choice = Annotated[str, Field(min_length=1, max_length=1000)]


class ConstraintSpec(StrictModel):
    """One of these languages. A solution that ends by itself is of it; one that a limit cuts has no answer."""

    json_schema: dict[str, Any] | bool | None = Field(None, description="JSON that is valid under this JSON Schema.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")
    regex: _Source | None = Field(None, description="A text that this regular expression matches as a whole.")
    grammar: _Source | None = Field(
        None, description="A text of this Lark grammar's rule 'start', in the dialect of llguidance."
    )
    choice: Annotated[list[_Choice], Field(min_length=1, max_length=MAX_CHOICES)] | None = Field(
        None, description="One of these texts."
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(type(self).model_fields)
            raise ValueError(f"give one of {names}, not {' and '.join(given) or 'none'}")
        if self.choice is not None and len(set(self.choice)) < len(self.choice):
            twice = next(text for text in self.choice if self.choice.count(text) > 1)
            raise ValueError(f"choice: {twice!r} is listed twice")
        try:
            length = len(json.dumps(self.json_schema))
        except RecursionError:
            raise ValueError("json_schema: it is nested too deeply") from None
        if length > MAX_CONSTRAINT_CHARS:
            raise ValueError(f"json_schema: it has more than {MAX_CONSTRAINT_CHARS} characters")
        return self

    @property
    def is_json(self) -> bool:
        """True if the solutions are JSON."""
        return self.json_schema is not None or self.json_object is not None

    def to_constraint(self) -> Constraint:
        """Return the constraint for the engine."""
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.grammar is not None:
            return Constraint("grammar", self.grammar)
        if self.choice is not None:
            return Constraint("choice", json.dumps(self.choice))
        return Constraint("json", json.dumps({"type": "object"} if self.json_object else self.json_schema))
