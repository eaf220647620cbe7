"""Conversion of Redis strings to documents: a job's hash, the entries of its stream, and usage."""

from __future__ import annotations

import json
from typing import Any

from reasoner.budget.usage import Usage
from reasoner.jobs.events import Event
from reasoner.jobs.journal import Entry

JobDocument = dict[str, Any]
"""A job in the API's format: the JSON of ``reasoner.jobs.job.Job``, not validated again on reading."""


def job_key(job_id: str) -> str:
    """Return the Redis key of a job's hash."""
    return f"reasoner:job:{job_id}"


def to_json(value: Any) -> str:
    """Return compact JSON. Raises ``ValueError`` for numbers that JSON does not have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def usage_of(fields: dict[str, str]) -> Usage:
    """Return the usage stored in a hash."""
    usage = {name.removeprefix("usage:"): value for name, value in fields.items() if name.startswith("usage:")}
    return Usage.model_validate_strings(usage)


def event(entry_id: str, fields: dict[str, str]) -> Event:
    """Return an entry of a job's stream in the clients' format."""
    return Event(
        seq=int(entry_id.removesuffix("-0")),
        type=fields["type"],
        at=float(fields["at"]),
        key=fields.get("key"),
        data=json.loads(fields["data"]),
        spend=json.loads(fields.get("spend", "{}")),
    )


def entry(fields: dict[str, str]) -> Entry:
    """Return an entry with a key in the replay log's format."""
    spend = Usage.model_validate_json(fields["spend"])
    return Entry(
        fields["key"], fields["type"], data=json.loads(fields["data"]), spend=spend, elapsed=float(fields["elapsed"])
    )


def document(fields: dict[str, str]) -> JobDocument:
    """Return the document of a job's hash."""

    def moment(name: str) -> float | None:
        return float(fields[name]) if name in fields else None

    return {
        "id": fields["id"],
        "status": fields["status"],
        "created_at": moment("created"),
        "started_at": moment("started"),
        "finished_at": moment("finished"),
        "attempt": int(fields["attempt"]),
        "batch": fields.get("batch"),
        "last_seq": int(fields["seq"]),
        "spec": json.loads(fields["spec"]),
        "usage": usage_of(fields).model_dump(),
        "result": json.loads(fields.get("result", "null")),
        "error": json.loads(fields.get("error", "null")),
        "waiting": _build_waiting(fields),
        "delivery": _build_delivery(fields),
    }


def _build_waiting(fields: dict[str, str]) -> dict[str, Any] | None:
    if "waiting" not in fields or fields["status"] not in ("queued", "in_progress"):
        return None
    return {
        "reason": fields["waiting"],
        "detail": fields.get("detail", ""),
        "since": int(fields.get("unserved", 0)) / 1000,
        "attempts": int(fields.get("releases", 0)),
    }


def _build_delivery(fields: dict[str, str]) -> dict[str, Any] | None:
    if "webhook:state" not in fields:
        return None
    return {
        "state": fields["webhook:state"],
        "attempts": int(fields["webhook:attempt"]),
        "error": fields["webhook:error"] or None,
    }
