"""Constraints as grammars for llguidance.

JSON is written with at most one space between its tokens, or on lines with indentation, so that no branch can fill its
limit with blanks. ``\\d`` of a regular expression is one of 0 to 9.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.protocol.constraint import Constraint
from engine.protocol.json_schema import check_schema, tighten_formats
from engine.protocol.types import InvalidRequest

JSON_WHITESPACE = r"(\n[ \t]{0,64}| )?"
_JSON_OPTIONS = {"whitespace_pattern": JSON_WHITESPACE, "json_allowed_escapes": 'nrbtf"\\'}
"""Without ``\\u``, by which a name of ``properties`` could be written as an additional one: ``\\u0061`` for ``a``."""
_ONE_LINE_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": _JSON_OPTIONS["json_allowed_escapes"],
}
_ALL_TOKENIZATIONS = '%llguidance {"no_forcing": true}'
"""Directive without which a text that the language forces could be written by its canonical tokens alone."""


def write_grammar(constraint: Constraint) -> str:
    """Return a constraint as a Lark grammar for llguidance; it is checked only where a matcher is made of it."""
    from llguidance import LLMatcher, regex_to_lark

    match constraint.kind:
        case "json":
            schema = json.loads(constraint.value)
            if not isinstance(schema, dict | bool):
                raise InvalidRequest("the constraint is no JSON Schema, which is an object or a boolean", "constraint")
            text = f"start: {write_json_rule(schema)}"
        case "regex":
            text = f"start: /{regex_to_lark(constraint.value, use_ascii='d')}/"
        case "choice":
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.value))
            text = f"start: {choices}"
        case "grammar":
            text = constraint.value
    return LLMatcher.grammar_from_lark(f"{_ALL_TOKENIZATIONS}\n{text}")


def write_json_rule(schema: dict[str, Any] | bool, *, is_one_line: bool = False) -> str:
    """Return the body of a rule for JSON that is valid under a schema. Raises ``InvalidRequest``.

    ``is_one_line``: it is written as Python's ``json.dumps`` does, and as chat templates write calls.
    """
    check_schema(schema)
    tighten_formats(schema)
    schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    options = _ONE_LINE_OPTIONS if is_one_line else _JSON_OPTIONS
    return f"%json {json.dumps(schema | {'x-guidance': options})}"


@contextmanager
def refuse_panics(purpose: str = "compile") -> Iterator[None]:
    """Raise ``InvalidRequest`` where the library panics, which in Python is no ``Exception``."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the class cannot be imported
            raise
        raise InvalidRequest(f"llguidance fails to {purpose} it: {error}", "constraint") from None


def summarize_error(message: str) -> str:
    """Return llguidance's error message as one line, without the grammar that it repeats."""
    first, *others = message.strip().splitlines() or [""]
    causes = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([first, *causes])
