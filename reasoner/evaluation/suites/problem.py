"""A problem of a suite, and the split of problems into training and held-out ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.tool_specs import FunctionTool

Split = Literal["train", "heldout"]

Examples = tuple[tuple[str, str], ...]
"""Pairs of a question and its solution."""

HELDOUT_ONE_IN = 10
"""Reciprocal of the fraction of canonical problems that are held out."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with the data that its checker needs.

    ``text`` is the prompt, ``answer`` a correct answer as written in ``\\boxed{}``, and ``data`` the plain JSON values
    that the suite's exact checker needs.
    """

    id: str
    suite: str
    level: str
    text: str
    answer: str
    data: dict[str, Any] = field(hash=False)
    examples: Examples = ()
    """Questions with solutions that the model sees before the problem, as turns of the chat."""
    tools: tuple[FunctionTool, ...] = field(default=(), hash=False)
    """Functions of which a solution must call some."""
    constraint: ConstraintSpec | None = field(default=None, hash=False)
    """Language to which solutions are held."""

    def to_job_fields(self) -> dict[str, Any]:
        """Return the fields of a job that asks the problem."""
        fields: dict[str, Any] = {"messages": self.to_messages()}
        if self.tools:
            fields |= {"tools": list(self.tools), "tool_choice": "required"}
        if self.constraint is not None:
            fields["constraint"] = self.constraint
        return fields

    def to_messages(self) -> list[dict[str, str]]:
        """Return the examples and the problem as chat messages."""
        turns = [*chain.from_iterable(self.examples), self.text]
        return [
            {"role": "assistant" if index % 2 else "user", "content": content} for index, content in enumerate(turns)
        ]


def hash_problem(canonical: str) -> int:
    """Return a 64-bit hash of a canonical problem, the same on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(canonical.encode(), digest_size=8).digest(), "big")


def split_of(canonical: str) -> Split:
    """Return the split of a canonical problem, which does not depend on wording or the order of numbers."""
    return "heldout" if hash_problem(canonical) % HELDOUT_ONE_IN == 0 else "train"
