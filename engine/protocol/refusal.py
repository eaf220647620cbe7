"""The reason for which a server refuses one branch for good, while others go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RefusalKind = Literal["failed", "invalid", "too_long", "filtered", "away"]
"""``invalid``: the request can never be served. ``too_long``: neither can it, since the question leaves no room for an
answer. ``filtered``: the server withholds the rest of the answer for its content. ``away``: it did not answer, and the
search goes on with other models. ``failed``: anything else."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal in the server's own words. ``field`` names what is invalid in the request, if the server does."""

    message: str
    field: str | None = None
    kind: RefusalKind = "failed"
