"""Validity of a text as JSON under a schema, decided in a process of its own, since patterns may backtrack for long."""

from __future__ import annotations

from typing import Any

from reasoner.subprocess_pool import WorkerPool

TIMEOUT_SECONDS = 5.0
"""Processor time for one text; a schema whose patterns backtrack for longer counts as not met."""
SCHEMAS = WorkerPool("reasoner.answers.schema_worker")


async def is_valid_json(text: str, schema: dict[str, Any] | bool) -> bool:
    """Return True if a text is JSON that is valid under a schema."""
    return await SCHEMAS.call({"schema": schema, "text": text}, TIMEOUT_SECONDS) is True
