"""Check of a job's constraint at admission: the engine must be able to enforce it, and a finite text must fulfil it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from engine.protocol.constraint import Constraint
from engine.protocol.empty_languages import NO_TEXT, can_begin, find_emptiness
from engine.protocol.grammar_text import refuse_panics, summarize_error, write_grammar
from engine.protocol.json_schema import has_bounded_multiples
from engine.protocol.types import InvalidRequest
from reasoner.admission.refusal import JobRefused
from reasoner.jobs.constraint_spec import ConstraintSpec

_CONTAINERS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def check_constraint(spec: ConstraintSpec) -> None:
    """Raise ``JobRefused``, with the keyword and its path, for a constraint that no solution could be held to."""
    constraint = spec.to_constraint()
    field = "constraint." + next(name for name in type(spec).model_fields if getattr(spec, name) is not None)
    if spec.json_schema is False:
        raise _refuse(field, "no JSON is valid under the schema false: give an object of keywords")
    if isinstance(spec.json_schema, dict):
        check_schema(spec.json_schema, field)
        return
    error = find_error(constraint)
    if error is not None:
        raise _refuse(field, f"it cannot be enforced: {error}")
    _check_texts(constraint, field)


def check_schema(schema: dict[str, Any], field: str) -> None:
    """Raise ``JobRefused``, with the keyword and its path in ``field``, for a schema that no JSON could be held to."""
    constraint = Constraint("json", json.dumps(schema))
    error = find_error(constraint)
    if error is not None:
        path, error = _locate(schema, schema, "", error)
        raise _refuse(field + path, f"it cannot be enforced: {error}")
    for path in _find_lost_numbers(schema, schema, ""):
        message = "no multiple of 'multipleOf' is found between its bounds: widen them, or list the numbers in 'enum'"
        raise _refuse(field + path, message)
    _check_texts(constraint, field)


def _check_texts(constraint: Constraint, field: str) -> None:
    reason = find_emptiness(constraint)
    if reason in (None, NO_TEXT) and not can_begin(constraint):
        reason = "no text but the empty one fulfils it: write a language with at least one text"
    if reason is not None:
        raise _refuse(field, reason)


def find_error(constraint: Constraint) -> str | None:
    """Return the reason why a constraint cannot be enforced, in one line; ``None`` if it can."""
    try:
        with refuse_panics():
            has_error, messages = LLMatcher.validate_grammar_with_warnings(write_grammar(constraint))
    except InvalidRequest as error:
        return str(error)
    if not has_error:
        return None
    message = summarize_error(messages[0])
    if message.startswith("at "):  # the place in the grammar, which begins with a line of our own
        place, _, message = message.partition(": ")
        if constraint.kind == "grammar":
            line, _, column = place.removeprefix("at ").partition("(")
            message = f"line {int(line) - 1}, column {column.rstrip(')')}: {message}"
    return message.removeprefix("failed to compile JSON schema: ")


def _locate(root: dict[str, Any], schema: dict[str, Any], path: str, error: str) -> tuple[str, str]:
    """Return the path of the innermost schema that cannot be enforced, and the reason."""
    for step, child in _list_children(schema):
        inner = find_error(_embed_definitions(root, child))
        if inner is not None:
            return _locate(root, child, f"{path}.{step}", inner)
    return path, error


def _embed_definitions(root: dict[str, Any], schema: dict[str, Any]) -> Constraint:
    """Return the constraint of a schema within another one, with the definitions that it may refer to."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return Constraint("json", json.dumps(shared | schema))


def _find_lost_numbers(root: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the paths of schemas of which no text can begin, although the library has no objection."""
    constraint = _embed_definitions(root, schema)
    if has_bounded_multiples(schema, root) and find_error(constraint) is None and not can_begin(constraint):
        yield path
    for step, child in _list_children(schema):
        yield from _find_lost_numbers(root, child, f"{path}.{step}")


def _list_children(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, Any]] = []
    for name in _CONTAINERS:
        if isinstance(schema.get(name), dict):
            found += [(f"{name}.{key}", child) for key, child in schema[name].items()]
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            found += [(f"{name}.{index}", child) for index, child in enumerate(schema[name])]
    found += [(name, schema[name]) for name in _SINGLE if name in schema]
    return [(step, child) for step, child in found if isinstance(child, dict)]


def _refuse(field: str, message: str) -> JobRefused:
    return JobRefused("invalid-request", field, message)
