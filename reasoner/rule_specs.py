"""Verifiers that are rules: they know what is right, so their score is a fact and costs no tokens.

A rule judges finished solutions by the answers that they state. What a rule itself says wrongly (a pattern, a schema, a
test that is no Python) is refused when the job is submitted.
"""

from __future__ import annotations

import ast
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue

from reasoner.patterns import check_pattern
from reasoner.strict import VerifierSpec

MAX_SCHEMA_CHARS = 20_000


class RuleSpec(VerifierSpec):
    """What all rules have."""

    certain: ClassVar[bool] = True


class ExactVerifier(RuleSpec):
    """1 for one text, without the white space around it."""

    kind: Literal["exact"]
    expected: Annotated[str, Field(min_length=1, max_length=64_000)]


class NumericVerifier(RuleSpec):
    """1 for a number near enough to the expected one: within ``absolute``, or ``relative`` times the expected one."""

    kind: Literal["numeric"]
    expected: Annotated[int | float, Field(ge=-1e300, le=1e300)]
    absolute: Annotated[float, Field(ge=0)] = 0.0
    relative: Annotated[float, Field(ge=0)] = 0.0


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
    try:
        Draft202012Validator.check_schema(schema, format_checker=FormatChecker(("regex",)))
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message[:500]} (at {error.json_path})") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ValueError(f"$ref {reference[:200]!r} leads out of the schema: only references into it are followed")
    return schema


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
        compile(source, "<test>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"not Python: {error}") from None
    except (RecursionError, MemoryError):
        raise ValueError("not Python: nested too deeply") from None
    if not any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree)):
        raise ValueError("the test asserts nothing, so that every answer would pass it")
    return source


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
