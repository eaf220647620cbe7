"""Markdown tables of JSON schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Schema = dict[str, Any]
_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; cells may hold any text."""
    lines = [columns, ["---"] * len(columns), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def code(value: object) -> str:
    return f"`{value}`"


def default_of(schema: Schema) -> str:
    """Return the default as JSON-like code, or an empty string if there is none worth a word."""
    if "default" not in schema or schema["default"] in (None, {}, []):
        return ""
    value = schema["default"]
    return code(str(value).lower() if isinstance(value, bool) else value)


def type_of(schema: Schema, link: Callable[[str], str] = code) -> str:
    """Return a schema's type, with bounds and choices; ``link`` renders the name of a referenced schema."""
    if "$ref" in schema:
        return link(schema["$ref"].rsplit("/", 1)[-1])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            kinds = [type_of(kind, link) for kind in schema[word] if kind.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "allOf" in schema:
        return type_of(schema["allOf"][0], link)
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return ", ".join(code(choice) for choice in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"array of {type_of(schema.get('items', {}), link)}"
    bounds = [text.format(schema[word]) for word, text in _BOUNDS.items() if word in schema]
    return ", ".join([kind, *bounds])


def fields(schema: Schema, link: Callable[[str], str] = code) -> str:
    """Return a table of an object's fields."""
    required = set(schema.get("required", ()))
    rows = [
        (code(name), type_of(field, link), "required" if name in required else default_of(field), _about(field))
        for name, field in schema.get("properties", {}).items()
    ]
    return table(("field", "type", "default", ""), rows)


def _about(field: Schema) -> str:
    return str(field.get("description", ""))
