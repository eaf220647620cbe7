"""Calls of functions in answers: their ids, and the pieces in which streams send them."""

from __future__ import annotations

import re
from hashlib import blake2b

MAX_PIECE_CHARS = 32
"""Length of a piece of arguments in a stream."""
_ID_CHARS = 9
"""Length of the ids of calls: some chat templates (Mistral's) take no other."""


def make_call_id(job_id: str, index: int, choice: int = 0) -> str:
    """Return the id of a call of one of an answer's choices, which is always the same."""
    return blake2b(f"{job_id}/{choice}/{index}".encode(), digest_size=8).hexdigest()[:_ID_CHARS]


def split_arguments(arguments: str) -> list[str]:
    """Return the pieces in which a stream sends arguments."""
    return re.findall(f"(?s).{{1,{MAX_PIECE_CHARS}}}", arguments)
