"""Verifiers that are rules: they know what is right, so their score is a fact and costs no tokens.

A rule judges finished solutions by the answers that they state. What a rule itself says wrongly (a pattern, a schema, a
test that is no Python) is refused when the job is submitted.
"""

from __future__ import annotations

import ast
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue

from reasoner.base_model import VerifierSpec
from reasoner.regex import check_pattern

MAX_SCHEMA_CHARS = 20_000
MAX_SCHEMAS = 1000
"""Schemas in a schema: to check one of them takes a tenth of a millisecond."""
MAX_TIMES = 8
"""Times its own size that a test may have when its finally blocks are written out, as compiling does it."""


class RuleSpec(VerifierSpec):
    """What all rules have."""

    is_conclusive: ClassVar[bool] = True


class ExactVerifier(RuleSpec):
    """1 for one text, without the white space around it."""

    kind: Literal["exact"]
    expected: Annotated[str, Field(min_length=1, max_length=64_000)]


class NumericVerifier(RuleSpec):
    """1 for a number near enough to the expected one: within ``absolute``, or ``relative`` times the expected one."""

    kind: Literal["numeric"]
    expected: Annotated[
        int | float, Field(ge=-1e300, le=1e300, json_schema_extra={"minimum": -1e300, "maximum": 1e300})
    ]
    absolute: Annotated[float, Field(ge=0, le=1e300)] = 0.0
    relative: Annotated[float, Field(ge=0, le=1)] = 0.0


class MathVerifier(RuleSpec):
    """1 for what is the same mathematics as the expected expression, in LaTeX or plain."""

    kind: Literal["math"]
    expected: Annotated[str, Field(min_length=1, max_length=1000)]


class RegexVerifier(RuleSpec):
    """1 for an answer that the pattern, in Python's syntax, matches from its first to its last character."""

    kind: Literal["regex"]
    pattern: Annotated[str, AfterValidator(check_pattern)]


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    from jsonschema import Draft202012Validator, FormatChecker
    from jsonschema.exceptions import SchemaError

    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise ValueError(f"the schema has more than {MAX_SCHEMA_CHARS} characters")
    formats = FormatChecker(())
    formats.checks("regex", raises=ValueError)(_is_pattern)  # the library's own check compiles it
    try:
        if _schemas(schema) > MAX_SCHEMAS:
            raise ValueError(f"the schema has more than {MAX_SCHEMAS} schemas in it")
        Draft202012Validator.check_schema(schema, format_checker=formats)
    except SchemaError as error:
        why = f": {error.cause}" if error.cause else ""
        raise ValueError(f"not a JSON schema: {error.message[:500]}{why} (at {error.json_path})") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ValueError(f"$ref {reference[:200]!r} leads out of the schema: only references into it are followed")
    return schema


def _is_pattern(value: object) -> bool:
    return not isinstance(value, str) or check_pattern(value) == value


def _schemas(part: Any) -> int:
    """About how many schemas there are: each is an object or a truth value."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return isinstance(part, dict | bool) + sum(map(_schemas, inner))


def _references(part: Any) -> list[str]:
    if isinstance(part, list):
        return [found for item in part for found in _references(item)]
    if not isinstance(part, dict):
        return []
    own = [part[name] for name in ("$ref", "$dynamicRef") if isinstance(part.get(name), str)]
    return own + [found for item in part.values() for found in _references(item)]


class JsonSchemaVerifier(RuleSpec):
    """1 for an answer that is JSON and valid under the schema (draft 2020-12)."""

    kind: Literal["json_schema"]
    json_schema: Annotated[dict[str, JsonValue], AfterValidator(_check_schema)]


def _check_test(source: str) -> str:
    try:
        tree = ast.parse(source)
        multiplied = compiled_parts(tree)[0] > MAX_TIMES * sum(1 for _ in ast.walk(tree))
        if not multiplied:
            compile(source, "<test>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise ValueError("not Python: nested too deeply") from None
    if multiplied:
        raise ValueError(
            "the test's finally blocks multiply when they are compiled: nest fewer, or leave them fewer ways"
        )
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree)):
        raise ValueError("the test asserts nothing, so that every answer would pass it")
    return source


def compiled_parts(node: ast.AST) -> tuple[int, int]:
    """Return about how many syntax nodes are compiled for a node, and the ways out of it among them.

    A finally block is compiled once for each way out of what it belongs to, so that nested ones multiply.
    """
    repeated = node.finalbody if isinstance(node, ast.Try | ast.TryStar) else []
    parts, exits = 1, int(isinstance(node, ast.Return | ast.Break | ast.Continue))
    for child in ast.iter_child_nodes(node):
        if child not in repeated:
            more, out = compiled_parts(child)
            parts, exits = parts + more, exits + out
    copies = 2 + exits  # the end of the block and an exception are ways out, too
    for child in repeated:
        more, out = compiled_parts(child)
        parts, exits = parts + copies * more, exits + copies * out
    return parts, exits


class PythonVerifier(RuleSpec):
    """1 for Python code that passes all tests, in a sandbox. A test is Python that uses the answer's functions, such as
    "assert add(2, 3) == 5"; functions in it whose names begin with "test" are called. Values go in and out by copy."""

    kind: Literal["python"]
    tests: Annotated[
        list[Annotated[str, Field(max_length=20_000), AfterValidator(_check_test)]], Field(min_length=1, max_length=100)
    ]
    share: bool = Field(False, description="The score is the share of tests that pass, not all or nothing.")
    seconds: Annotated[float, Field(gt=0, le=60)] = Field(10.0, description="For all tests of one answer.")
    memory_mb: Annotated[int, Field(ge=64, le=4096)] = Field(512, description="For the answer's process.")


Rule = ExactVerifier | NumericVerifier | MathVerifier | RegexVerifier | JsonSchemaVerifier | PythonVerifier
