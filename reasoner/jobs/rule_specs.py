"""Rule verifiers: programmatic checks of the stated answer. Their score is conclusive and costs no tokens.

Rules score finished solutions only. A rule that is invalid itself (a bad pattern or schema, a test that is not Python)
is rejected when the job is submitted.
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
"""Maximum number of nested schemas: checking each takes about a tenth of a millisecond."""
MAX_COMPILED_GROWTH = 8
"""Maximum ratio of a test's compiled size to its source size; the compiler copies finally blocks."""


class RuleSpec(VerifierSpec):
    """Base of all rules."""

    is_conclusive: ClassVar[bool] = True

    def check(self, answer: str) -> float:
        """Return the score of an answer, 0 to 1. It runs in a thread. Rules that take no time, or need a
        child process, have their checks in ``reasoner.verifiers.rules``."""
        raise NotImplementedError(f"the rule {self.kind!r} has no check")


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
    format_checker = FormatChecker(())
    format_checker.checks("regex", raises=ValueError)(_is_pattern)  # the library's own check compiles the pattern
    try:
        if _count_schemas(schema) > MAX_SCHEMAS:
            raise ValueError(f"the schema has more than {MAX_SCHEMAS} schemas in it")
        Draft202012Validator.check_schema(schema, format_checker=format_checker)
    except SchemaError as error:
        cause = f": {error.cause}" if error.cause else ""
        raise ValueError(f"not a JSON schema: {error.message[:500]}{cause} (at {error.json_path})") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    for reference in _list_references(schema):
        if not reference.startswith("#"):
            raise ValueError(
                f"$ref {reference[:200]!r} points outside of the schema: use references that begin with '#'"
            )
    return schema


def _is_pattern(value: object) -> bool:
    return not isinstance(value, str) or check_pattern(value) == value


def _count_schemas(part: Any) -> int:
    """Return the approximate number of schemas in ``part``: each is an object or a boolean."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return isinstance(part, dict | bool) + sum(map(_count_schemas, inner))


def _list_references(part: Any) -> list[str]:
    if isinstance(part, list):
        return [reference for item in part for reference in _list_references(item)]
    if not isinstance(part, dict):
        return []
    own = [part[name] for name in ("$ref", "$dynamicRef") if isinstance(part.get(name), str)]
    return own + [reference for item in part.values() for reference in _list_references(item)]


class JsonSchemaVerifier(RuleSpec):
    """1 for an answer that is JSON and valid under the schema (draft 2020-12)."""

    kind: Literal["json_schema"]
    answer_language: ClassVar[str | None] = "json"
    json_schema: Annotated[dict[str, JsonValue], AfterValidator(_check_schema)]


def _check_test(source: str) -> str:
    try:
        tree = ast.parse(source)
        is_too_large = count_compiled_nodes(tree)[0] > MAX_COMPILED_GROWTH * sum(1 for _ in ast.walk(tree))
        if not is_too_large:
            compile(source, "<test>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise ValueError("not Python: nested too deeply") from None
    if is_too_large:
        raise ValueError(
            "the test's nested finally blocks grow too large when compiled: nest fewer, or use fewer return, break "
            "and continue statements inside of them"
        )
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree)):
        raise ValueError("the test asserts nothing, so every answer would pass: add an assert, a raise or a call")
    return source


def count_compiled_nodes(node: ast.AST) -> tuple[int, int]:
    """Return the approximate number of syntax nodes compiled for ``node``, and how many of them are exits.

    The compiler copies a finally block once for each exit (return, break, continue) of its try statement, so the size
    of nested ones multiplies.
    """
    repeated = node.finalbody if isinstance(node, ast.Try | ast.TryStar) else []
    num_nodes, num_exits = 1, int(isinstance(node, ast.Return | ast.Break | ast.Continue))
    for child in ast.iter_child_nodes(node):
        if child not in repeated:
            nodes, exits = count_compiled_nodes(child)
            num_nodes, num_exits = num_nodes + nodes, num_exits + exits
    num_copies = 2 + num_exits  # the end of the block and an exception are exits, too
    for child in repeated:
        nodes, exits = count_compiled_nodes(child)
        num_nodes, num_exits = num_nodes + num_copies * nodes, num_exits + num_copies * exits
    return num_nodes, num_exits


class PythonVerifier(RuleSpec):
    """1 for Python code that passes all tests, in a sandbox. A test is Python that uses the answer's functions, such as
    "assert add(2, 3) == 5"; functions in it whose names begin with "test" are called. Values go in and out by copy."""

    kind: Literal["python"]
    answer_language: ClassVar[str | None] = "python"
    tests: Annotated[
        list[Annotated[str, Field(max_length=20_000), AfterValidator(_check_test)]], Field(min_length=1, max_length=100)
    ]
    share: bool = Field(False, description="The score is the share of tests that pass, not all or nothing.")
    seconds: Annotated[float, Field(gt=0, le=60)] = Field(10.0, description="For all tests of one answer.")
    memory_mb: Annotated[int, Field(ge=64, le=4096)] = Field(512, description="For the answer's process.")


RULES: tuple[type[RuleSpec], ...] = (
    ExactVerifier,
    NumericVerifier,
    MathVerifier,
    RegexVerifier,
    JsonSchemaVerifier,
    PythonVerifier,
)
"""The rules that a job can name, in the order in which they are listed."""
