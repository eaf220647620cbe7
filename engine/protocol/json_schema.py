"""JSON Schemas of which llguidance alone would let invalid texts pass: they are tightened, or refused.

``tests/engine/grammar/test_schemas.py`` looks for more of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from engine.protocol.types import InvalidRequest

MAX_DEPTH = 50
"""Number of schemas within each other. Each may be two levels of JSON, and llguidance reads 128."""
_EXACT = 2**53
"""Integers beyond this are rounded to a double."""
_CONTROL = frozenset(map(chr, (*range(32), 127))) - frozenset("\b\f\n\r\t")
_SAME_VALUE = ("allOf", "anyOf", "oneOf")
_EXCLUSIVE = {"exclusiveMinimum": ("maximum", "exclusiveMaximum"), "exclusiveMaximum": ("minimum", "exclusiveMinimum")}
"""Exclusive bounds, and those on the other side."""
_PATTERNS = {
    "email": r"^[^@]{1,64}@([^@.]{1,48}\.){0,4}[^@.]{1,48}$",
    "hostname": "^.{1,253}$",
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
    "date-time": "^.{11}[0-9]{2}:[0-9]{2}:[0-5]",
}
"""Patterns of formats that llguidance keeps but for the limits of RFC 5321 (section 4.5.3.1) and RFC 1035 (section
2.3.4), and for leap seconds, which RFC 3339 has at the end of a day in UTC only. Five labels of 48 characters are less
than a domain may have, which would make the expression too large."""


def tighten_formats(schema: Any) -> None:
    """Add patterns to a schema, in place, so that all texts of its formats are valid.

    An address with a pattern of its own is left alone: three expressions of that size cannot be combined.
    """
    for inner in list(_walk(schema)):
        name = inner.get("format")
        if isinstance(name, str) and name in _PATTERNS and not (name == "email" and "pattern" in inner):
            parts = inner.get("allOf", [])
            inner["allOf"] = [*parts, {"pattern": _PATTERNS[name]}] if isinstance(parts, list) else parts


def check_schema(schema: Any) -> None:
    """Raise ``InvalidRequest`` with the reason if some text of the schema's grammar could be invalid."""
    for inner in list(_walk(schema)):
        _check_numbers(inner)
        _check_characters(inner)
        _check_bounds(inner, schema)
        _check_count(inner)


def _walk(schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a schema and all those within it that constrain a value; booleans are left out."""
    if not isinstance(schema, dict):
        return
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"the schema is nested too deeply: at most {MAX_DEPTH} levels", "constraint")
    yield schema
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            inner = list(value.values())
        elif name in (*_SAME_VALUE, "prefixItems") and isinstance(value, list):
            inner = value
        elif name in ("items", "additionalProperties"):
            inner = [value]
        else:
            continue
        for child in inner:
            yield from _walk(child, depth + 1)


def _check_numbers(schema: dict[str, Any]) -> None:
    names = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    for name in names:
        for number in _iterate_integers(schema.get(name)):
            if abs(number) > _EXACT:
                raise InvalidRequest(
                    f"{name}: the integer {number} would be rounded: write one of at most {_EXACT}, or a string",
                    "constraint",
                )


def _check_characters(schema: dict[str, Any]) -> None:
    """Refuse values with control characters that have no escape of one letter, which the grammar would leave out."""
    for name in ("const", "enum"):
        for text in _iterate_strings(schema.get(name)):
            strange = next((character for character in text if character in _CONTROL), None)
            if strange is not None:
                raise InvalidRequest(f"{name}: the control character {strange!r} cannot be written", "constraint")


def _iterate_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _iterate_strings(item)


def _iterate_integers(value: Any) -> Iterator[int]:
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_integers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _check_bounds(schema: dict[str, Any], root: Any) -> None:
    """Refuse ranges of less than one that exclude an integer at one end, which llguidance includes."""
    together = list(_of_same_value(schema, root, set()))
    for name, others in _EXCLUSIVE.items():
        for excluded in _collect_bounds(together, (name,)):
            for other in _collect_bounds(together, others):
                if float(excluded).is_integer() and excluded != other and abs(excluded - other) < 1:
                    raise InvalidRequest(
                        f"{name}: {excluded:g} cannot be excluded from a range of less than one, up to {other:g}: "
                        "write a bound that is no integer",
                        "constraint",
                    )


def has_bounded_multiples(schema: dict[str, Any], root: Any) -> bool:
    """Return True if a value is to be a multiple within two bounds, which llguidance may wrongly find to have none."""
    together = list(_of_same_value(schema, root, set()))
    groups = (("multipleOf",), ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
    return all(any(name in part for part in together for name in names) for names in groups)


def _check_count(schema: dict[str, Any]) -> None:
    """Refuse a number of names that the same name could reach by being written several times."""
    least, required = schema.get("minProperties"), schema.get("required")
    most = 1 + (len(set(map(str, required))) if isinstance(required, list) else 0)
    if isinstance(least, int) and least > most:
        raise InvalidRequest(
            f"minProperties: {least} distinct names cannot be enforced: list all of them but one in 'required'",
            "constraint",
        )


def _collect_bounds(schemas: list[dict[str, Any]], names: tuple[str, ...]) -> list[float]:
    found = [schema[name] for schema in schemas for name in names if name in schema]
    return [bound for bound in found if isinstance(bound, int | float)]


def _of_same_value(schema: Any, root: Any, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the schema and those that it combines or refers to, all of which constrain the same value."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in _SAME_VALUE:
        parts = schema.get(name)
        for part in parts if isinstance(parts, list) else ():
            yield from _of_same_value(part, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _of_same_value(resolve(root, reference), root, seen)


def resolve(root: Any, reference: str) -> Any:
    """Return the schema of a reference by JSON pointer or anchor within the document; ``None`` for any other."""
    if not reference.startswith("#"):
        return None
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        return next((inner for inner in _walk(root) if inner.get("$anchor") == fragment), None)
    value = root
    for step in fragment.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(step)] if step.isdecimal() and int(step) < len(value) else None
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value
