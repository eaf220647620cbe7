"""``Idempotency-Key``: a request that may have arrived can be sent again, and makes one job."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from fastapi import Header, Request

IdempotencyKey = Annotated[
    str | None, Header(min_length=1, max_length=255, description="The same key and body make one job, for a day.")
]
"""A batch counts as one."""


async def idempotency_of(key: str | None, request: Request) -> tuple[str, str] | None:
    """The key with the digest of its body, as ``api.http.submission`` takes them; ``None`` without a key."""
    return None if key is None else (key, _digest(await request.body()))


def _digest(body: bytes) -> str:
    """Of what the client said, not of how it was spelled."""
    canonical = json.dumps(json.loads(body), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
