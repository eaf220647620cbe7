"""The reference of an HTTP interface, from its OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

from docs.generate.tables import code, fields, table, type_of

_TITLES = {
    "jobs": "Jobs",
    "batches": "Batches",
    "keys": "Keys",
    "openai": "OpenAI-compatible routes",
    "anthropic": "Anthropic-compatible routes",
    "service": "Service",
    "engine": "Routes",
}


def page(title: str, introduction: str, document: dict[str, Any]) -> str:
    """Return a page with every operation, grouped by tag, then every schema."""
    schemas = document.get("components", {}).get("schemas", {})
    parts = [f"# {title}\n", introduction]
    by_tag: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            tag = operation.get("tags", ["engine"])[0]
            by_tag.setdefault(tag, []).append(_operation(method.upper(), path, operation))
    for tag, operations in by_tag.items():
        parts += [f"## {_TITLES.get(tag, tag.capitalize())}\n", *operations]
    parts.append("## Schemas\n")
    parts += [_schema(name, schema) for name, schema in sorted(schemas.items())]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parts = [f"### {method} {path}\n", f"{operation.get('summary', '')}.\n"]
    if text := operation.get("description"):
        parts.append(text.replace("``", "`") + "\n")
    if parameters := operation.get("parameters"):
        rows = [
            (code(one["name"]), one["in"], type_of(one["schema"]), one.get("description", "")) for one in parameters
        ]
        parts.append(table(("parameter", "in", "type", ""), rows))
    for content in operation.get("requestBody", {}).get("content", {}).values():
        parts.append(f"Body: {type_of(content['schema'], _link)}.\n")
        for example in content.get("examples", {}).values():
            parts.append(_json(example.get("summary", "Example"), example["value"]))
    answers = []
    for status, response in operation["responses"].items():
        for kind, content in response.get("content", {"": {}}).items():
            schema = content.get("schema", {})
            answers.append((f"`{status}`", kind, type_of(schema, _link) if schema else ""))
    parts.append(table(("status", "content", "schema"), answers))
    return "\n".join(parts)


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _schema(name: str, schema: dict[str, Any]) -> str:
    text = str(schema.get("description", "")).replace("``", "`")
    return "\n".join([f"### {name}\n", f"{text}\n", fields(schema, _link)])


def _json(title: str, value: object) -> str:
    return f"{title}:\n\n```json\n{json.dumps(value, indent=2, ensure_ascii=False)}\n```\n"
