"""A constraint that no solution could be held to is refused by name before a token is spent."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.protocol.finite_languages import can_schema_end, find_endless_start
from reasoner.admission.constraints import check_constraint
from reasoner.admission.refusal import JobRefused
from reasoner.admission.resolve import resolve_job
from reasoner.jobs.constraint_spec import ConstraintSpec
from reasoner.jobs.request import JobRequest
from tests.reasoner.admission.test_resolve import NoEngine
from workers.config.settings import Settings

LIST = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": True},
        {"json_schema": {}},
        {"json_schema": LIST},
        {"json_schema": {"anyOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"type": ["null", "object"]}}}},
        {"json_object": True},
        {"regex": r"\d+(\.\d+)?"},
        {"regex": "/"},
        {"choice": ['a"b', "\n", "ü"]},
        {"grammar": 'start: item ("," item)*\nitem: "a" | "(" start ")"'},
        {"grammar": 'start: "a" start | "b"'},
        {"grammar": 'start: /[a-z]{30}/ part\npart: "x" | MORE\nMORE: /b/ & /c/'},
        {"grammar": "start: /[a-z]{30}/ OTHER\nNOTHING: /b/ & /c/\nOTHER: ~NOTHING"},
        {"grammar": "start: /[a-z]{30}/ (/[^\\s\\S]/)?"},
        {"grammar": 'start: [start] "x"{0,3} "a"  // a comment: start'},
        {"grammar": 'start: NUMBER "|" /[|:]/\nNUMBER: /[0-9]/'},
        {"grammar": 'start: "x: " %json {"type": "integer"}'},
    ],
)
def test_an_enforceable_constraint_is_accepted(constraint: dict[str, Any]) -> None:
    check_constraint(ConstraintSpec.model_validate(constraint))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json_schema": False}, "constraint.json_schema: no JSON is valid"),
        (
            {"json_schema": {"properties": {"name": {"type": "string", "format": "idn-email"}}}},
            r"constraint.json_schema.properties.name: it cannot be enforced: Unknown format: idn-email",
        ),
        (
            {"json_schema": {"$defs": {"x": {"items": {"uniqueItems": True, "type": "array"}}}, "$ref": "#/$defs/x"}},
            r'constraint.json_schema.\$defs.x.items: it cannot be enforced: Unimplemented keys: \["uniqueItems"\]',
        ),
        ({"json_schema": {"anyOf": [{}, {"type": "odd"}]}}, "constraint.json_schema.anyOf.1: .*Invalid type: odd"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json_schema": {"$ref": "https://example.com/x"}}, "https://example.com/x"),
        ({"json_schema": LIST | {"required": ["next"]}}, "no finite JSON is valid"),
        (
            {"json_schema": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}},
            "no finite JSON is valid",
        ),
        ({"regex": "(a"}, "constraint.regex: it cannot be enforced: .*unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"[^\s\S]"}, "no text but the empty one"),
        ({"grammar": 'start: "a" start'}, "no text of rule 'start' can end"),
        ({"grammar": 'start: "a" /[a-z&&[^a-z]]/'}, "constraint.grammar: no text of rule 'start' can end"),
        ({"grammar": "start: /[a-z]{30}/ WORD\nWORD: /b+/ & /c+/"}, "no text of rule 'start' can end"),
        ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no finite JSON is valid"),
        ({"json_schema": {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}}, "no finite"),
        ({"grammar": 'start: a\na: "(" b ")"\nb: a | a b'}, "no text of rule 'start' can end"),
        ({"grammar": 'start: "x" %json {"$ref": "#"}'}, "no text of rule 'start' can end"),
        ({"grammar": 'start: "a" missing'}, 'line 1, column 8: unknown name: "missing"'),
        ({"grammar": 'begin: "a"'}, "constraint.grammar: it cannot be enforced: .*start"),
        ({"grammar": 'start: ""'}, "no text but the empty one"),
    ],
)
async def test_a_constraint_without_solutions_is_refused(constraint: dict[str, Any], message: str) -> None:
    request = JobRequest.model_validate({"problem": "?", "constraint": constraint})
    with pytest.raises(JobRefused, match=message):
        await resolve_job(request, Settings(), NoEngine())


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({}, "give one of json_schema, json_object, regex, grammar, choice, not none"),
        ({"regex": "a", "choice": ["a"]}, "not regex and choice"),
        ({"choice": ["a", "b", "a"]}, "'a' is listed twice"),
        ({"choice": []}, "at least 1 item"),
        ({"json_schema": {"description": "x" * 70_000}}, "more than 65536 characters"),
        ({"json_object": False}, "Input should be True"),
    ],
)
def test_the_shape_of_a_constraint_is_checked(constraint: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ConstraintSpec.model_validate(constraint)


@pytest.mark.parametrize(
    ("rules", "ends"),
    [
        ("start: start", False),
        ("start: start?", True),
        ("start: (start)", False),
        ('start: ("a" | start) start', False),
        ("start: a{2,3}\na: a", False),
        ('start: "[" (a ("," a)*)? "]"\na: start', True),
        ("start: a ~ 0..2\na: a", True),
        ('?start.2[capture]: "a"\n| start', True),
    ],
)
def test_rules_that_only_lead_to_themselves_never_end(rules: str, ends: bool) -> None:
    assert (find_endless_start(rules) is None) == ends


def test_a_schema_may_lead_to_itself_where_something_else_is_valid_too() -> None:
    recursive = {"type": "object", "required": ["a"], "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert can_schema_end(recursive)
    recursive["properties"]["a"]["anyOf"].pop()  # type: ignore[index]
    assert not can_schema_end(recursive)
    two = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}
    assert not can_schema_end(two)
