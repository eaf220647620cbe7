"""The reference of a job's events, from the models of their data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from docs.generate.tables import code, fields, table
from reasoner.jobs.events import EntryData


def page(data: Mapping[str, Any]) -> str:
    """Return the page; ``data`` are the pydantic models of the events' data by the events' types."""
    models = list(dict.fromkeys(data.values()))
    types = {model: [type for type, other in data.items() if other is model] for model in models}
    rows = [
        (", ".join(code(type) for type in types[model]), f"[{_paragraph(model)}](#{_title(model).lower()})")
        for model in models
    ]
    parts = [
        "# Events\n",
        "`GET /v1/jobs/ID/events` sends a job's events in order; `GET /v1/jobs/export?journal=true` has them too. "
        "Each is an object with `seq` (from 1, without gaps), `type`, `at` (Unix time), `key` (of journal entries), "
        "`data` and `spend` (what it added to the bill). The fields of `data`, by type:\n",
        table(("type", ""), rows),
        "An entry of the journal also has `batch`, the number of those that were written together, and `early` if "
        "it was written when its worker stopped. A client passes over types and fields that it does not know.\n",
    ]
    helpers: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema()
        if issubclass(model, EntryData):  # those of results are in the reference of the HTTP API
            helpers |= schema.get("$defs", {})
        parts += [f"## {_title(model)}\n", f"{_paragraph(model)}\n", _fields(schema, issubclass(model, EntryData))]
    parts += ["## Parts of several\n"]
    for name, schema in sorted(helpers.items()):
        parts += [f"### {name}\n", f"{schema.get('description', '')}\n".replace("``", "`"), fields(schema)]
    return "\n".join(parts)


_IN_HTTP = {
    "JobResult",
    "JobError",
    "Usage",
    "Alternative",
    "RankedCandidate",
    "TokenProbability",
    "TopToken",
    "Vote",
    "CalledFunction",
}
"""Schemas that the reference of the HTTP API has."""


def _title(model: Any) -> str:
    return str(model.__name__).removesuffix("Data")


def _fields(schema: dict[str, Any], is_entry: bool) -> str:
    common = set(EntryData.model_fields) if is_entry else set()
    own = {name: field for name, field in schema.get("properties", {}).items() if name not in common}
    return fields(schema | {"properties": own}) if own else "It has no fields of its own.\n"


def _paragraph(model: Any) -> str:
    return " ".join((model.__doc__ or "").replace("``", "`").split())
