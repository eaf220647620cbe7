"""Conversion of arguments that are written without quotes, by the types that the function's JSON Schema allows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reasoner.tools.formats.call import FunctionTool, MalformedCall, excerpt, parse_json
from reasoner.tools.formats.json_reading import write_json

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.0+)?", re.ASCII)
_CONSTANTS = {"null": {"null": "null", "none": "null"}, "boolean": {"true": "true", "false": "false"}}
"""Constants in lower case, with their JSON texts: templates write those of Python as well."""
_ORDER = ("null", "boolean", "integer", "number", "object", "array", "string")
"""Order in which types are tried: a text is every other type's value as well."""
_PYTHON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": float,
    "object": dict,
    "array": list,
    "string": str,
}


def convert_value(tool: FunctionTool, name: str, written: str) -> str:
    """Return the JSON text of an argument. One without a type in the schema is a string, as for Qwen's own parser.

    Raises ``MalformedCall`` that names the types if it has none of them.
    """
    properties = tool.parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    types = _find_types(schema, tool.parameters, frozenset()) or {"string"}
    for kind in _ORDER:
        if kind in types and (value := _convert(kind, written)) is not None:
            return value
    expected = " or ".join(kind for kind in _ORDER if kind in types)
    raise MalformedCall(f"argument {name!r} of {tool.name!r} must be of type {expected}, not {excerpt(written)}")


def _find_types(schema: Any, root: Mapping[str, Any], seen: frozenset[str]) -> set[str]:
    """Return the types that a schema allows, or none if it does not tell."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {name for name in kind if isinstance(name, str)}
    types: set[str] = set()
    for keyword in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(keyword, ()):
            types |= _find_types(option, root, seen)
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    types |= {_find_type(value) for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        types |= _find_types(_follow(reference, root), root, seen | {reference})
    return types


def _follow(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema to which a reference within it points."""
    target: Any = root
    for key in reference.removeprefix("#").split("/")[1:]:
        target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target if reference.startswith("#") else None


def _find_type(value: Any) -> str:
    return next(kind for kind in _ORDER if isinstance(value, _PYTHON_TYPES[kind]))


def _convert(kind: str, written: str) -> str | None:
    """Return the JSON text of a value of this type, or ``None`` if it is of another one."""
    bare = written.strip()
    match kind:
        case "null" | "boolean":
            return _CONSTANTS[kind].get(bare.lower())
        case "integer":
            return bare if _INTEGER.fullmatch(bare) else None
        case "number":
            return bare if _NUMBER.fullmatch(bare) else None
        case "object" | "array":
            return _convert_container(kind, bare)
        case "string":
            return write_json(written)
    return None


def _convert_container(kind: str, written: str) -> str | None:
    try:
        return written if isinstance(parse_json(written), _PYTHON_TYPES[kind]) else None
    except MalformedCall:
        return None
