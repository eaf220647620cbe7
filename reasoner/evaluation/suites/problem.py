"""What a problem of a suite is, and the rule that splits problems into training and held-out ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 10
"""One canonical problem in this many is held out."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with what is needed to check an answer.

    ``text`` is what a model reads, ``answer`` a correct answer as it would stand in ``\\boxed{}``, and ``data`` holds
    what the suite's exact checker needs (plain JSON values).
    """

    id: str
    suite: str
    level: str
    text: str
    answer: str
    data: dict[str, Any] = field(hash=False)


def hash_problem(canonical: str) -> int:
    """A 64-bit hash of a canonical problem that is the same on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(canonical.encode(), digest_size=8).digest(), "big")


def split_of(canonical: str) -> Split:
    """The only place that decides where a problem belongs; wording and number order do not matter to it."""
    return "heldout" if hash_problem(canonical) % HELDOUT_ONE_IN == 0 else "train"
