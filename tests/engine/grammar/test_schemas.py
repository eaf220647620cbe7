"""Random and published JSON Schemas: what a grammar lets end is valid, and what no grammar can keep is refused by name.

Answers are sampled by chance from the masks of the bundled policy's vocabulary, and validated by two implementations
of JSON Schema. Values that differ from a valid one at one place are offered too: the grammar must take no invalid one.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance", reason="the package llguidance is not installed")

from reasoner.admission.constraints import check_constraint
from reasoner.admission.refusal import JobRefused
from reasoner.jobs.constraint_spec import ConstraintSpec
from tests.engine.grammar.completion import accepts, complete, find_fault, parse, vary, write
from tests.engine.grammar.published import EXAMPLES, REFUSED
from tests.engine.grammar.schemas import FORMATS, generate_schemas, plant_keywords
from tests.seeds import shift

ATTEMPTS = 4
VARIATIONS = 3
REASONS = (
    "Unsatisfiable schema",  # most contradict themselves
    "Unable to determine if regex is empty",
    "min/maxProperties only supported when all keys listed in",
    "minProperties: ",
    "oneOf constraints are not supported",
    "patternProperty regexes .* are not disjoint",
    "would be rounded",
    "exclusiveM",
    "llguidance fails to compile it",
    "circular references with sibling keys",
    "no multiple of 'multipleOf' is found",
    "no finite JSON is valid",
    "no text but the empty one fulfils it",
)
"""Beginnings of the reasons for which generated schemas are refused."""


def find_refusal(schema: Any) -> str | None:
    try:
        check_constraint(ConstraintSpec(json_schema=schema))
    except JobRefused as refusal:
        return str(refusal)
    return None


def sample(schema: Any, name: str) -> str | None:
    """Return an answer, from one of some attempts: a few languages are hard to end by chance."""
    for attempt in range(ATTEMPTS):
        text = complete(schema, random.Random(shift(f"{name} {attempt}")))
        if text is not None:
            return text
    return None


def check_schemas(seed: int, count: int) -> Counter[str]:
    """Complete and validate answers to ``count`` schemas; return how many were valid, refused and not completed."""
    seen: Counter[str] = Counter()
    for index, schema in enumerate(generate_schemas(seed, count)):
        jsonschema.Draft202012Validator.check_schema(schema)
        refusal = find_refusal(schema)
        if refusal is not None:
            assert re.search("|".join(REASONS), refusal), (schema, refusal)
            seen["refused"] += 1
            continue
        text = sample(schema, f"{seed} {index}")
        if text is None:
            seen["not completed"] += 1
            continue
        assert (schema, text, find_fault(schema, text)) == (schema, text, None)
        seen["valid"] += 1
        rng = random.Random(shift(f"vary {seed} {index}"))
        for _ in range(VARIATIONS):
            other = write(vary(parse(text), rng), rng)
            if accepts(schema, other):
                assert (schema, other, find_fault(schema, other)) == (schema, other, None)
    return seen


def test_every_completed_answer_to_a_random_schema_is_valid() -> None:
    seen = check_schemas(seed=0, count=200)
    assert seen.total() == 200
    assert seen["valid"] > 140
    assert seen["not completed"] < 4


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 11))
def test_every_completed_answer_to_many_random_schemas_is_valid(seed: int) -> None:
    assert check_schemas(seed, 2000)["valid"] > 1400


@pytest.mark.parametrize("form", FORMATS)
def test_answers_keep_their_format(form: str) -> None:
    schema = {"type": "string", "format": form}
    for index in range(40):
        text = sample(schema, f"{form} {index}")
        assert text is not None
        assert (text, find_fault(schema, text)) == (text, None)


def test_a_keyword_that_cannot_be_kept_is_refused_by_name_and_path() -> None:
    for planted in plant_keywords(seed=0, count=200):
        refusal = find_refusal(planted.schema)
        assert refusal is not None, planted
        assert refusal.startswith(f"constraint.json_schema{planted.path}: "), (planted, refusal)
        assert f'Unimplemented keys: ["{planted.keyword}"' in refusal, (planted, refusal)


@pytest.mark.parametrize("name", EXAMPLES)
def test_answers_to_a_published_schema_are_valid(name: str) -> None:
    schema = EXAMPLES[name]
    assert find_refusal(schema) is None
    for index in range(5):
        text = sample(schema, f"{name} {index}")
        assert text is not None
        assert (text, find_fault(schema, text)) == (text, None)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_schema_that_cannot_be_kept_is_refused_by_name(name: str) -> None:
    schema, where = REFUSED[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    refusal = find_refusal(schema)
    assert refusal is not None
    assert re.search(where, refusal), refusal


@pytest.mark.parametrize(
    ("schema", "invalid"),
    [
        ({"type": "object", "properties": {"a": {"type": "null"}}}, r'{"\u0061": 1}'),
        ({"type": "object", "patternProperties": {"^S_": {"type": "null"}}}, r'{"\u0053_1": 1}'),
        ({"type": "string", "maxLength": 1}, r'"\ud83d\ude00\ud83d\ude00"'),
        ({"type": "object", "minProperties": 1}, "{}"),
        ({"type": "string", "format": "time"}, '"12:30:60Z"'),
        ({"type": "string", "format": "date-time"}, '"2024-01-01T12:30:60Z"'),
        ({"type": "string", "format": "email"}, f'"{"a" * 65}@b.de"'),
        ({"type": "string", "format": "hostname"}, f'"{".".join(["a" * 60] * 5)}"'),
        ({"type": "number", "exclusiveMinimum": 3}, "3"),
        ({"type": "integer", "enum": [1, 2]}, "3"),
    ],
)
def test_no_grammar_takes_what_is_invalid_in_an_unusual_way(schema: dict[str, Any], invalid: str) -> None:
    assert find_refusal(schema) is None
    assert find_fault(schema, invalid) is not None
    assert not accepts(schema, invalid)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**53 + 1}, "json_schema: it cannot be enforced: const: the integer 9007199254740993 would be"),
        ({"items": {"enum": [[{"a": -(2**60)}]]}}, "json_schema.items: .* enum: the integer -1152921504606846976"),
        ({"type": "integer", "maximum": 2**63 - 1}, "maximum: the integer 9223372036854775807 would be rounded"),
        ({"properties": {"x": {"const": "\x01"}}}, r"json_schema.properties.x: .*const: the control character '\\x01'"),
        ({"enum": [{"\x7f": 1}]}, r"enum: the control character '\\x7f' cannot be written"),
        (
            {"items": {"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}},
            "json_schema.items: .* exclusiveMinimum: 3 cannot be excluded from a range of less than one, up to 3.5",
        ),
        (
            {"allOf": [{"$ref": "#/$defs/a"}, {"minimum": -12.5}], "$defs": {"a": {"exclusiveMaximum": -12.0}}},
            "exclusiveMaximum: -12 cannot be excluded from a range of less than one, up to -12.5",
        ),
        (
            {"properties": {"x": {"type": "object", "minProperties": 2}}},
            "json_schema.properties.x: .* minProperties: 2 distinct names cannot be enforced",
        ),
        (
            {"items": {"type": "number", "minimum": 9.87, "maximum": 9.97, "multipleOf": 0.1}},
            "json_schema.items: no multiple of 'multipleOf' is found between its bounds",
        ),
        (
            {"properties": {"x": {"type": ["number", "integer"], "minimum": -12, "maximum": -12}}},
            "json_schema.properties.x: it cannot be enforced: llguidance fails to compile it",
        ),
    ],
)
def test_what_would_let_an_invalid_answer_pass_or_stop_a_branch_is_refused(
    schema: dict[str, Any], message: str
) -> None:
    refusal = find_refusal(schema)
    assert refusal is not None
    assert re.search(message, refusal), refusal


def test_a_schema_within_hundreds_of_others_is_refused_at_once() -> None:
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(300):
        nested = {"allOf": [nested]}
    assert "nested too deeply: at most 50 levels" in str(find_refusal(nested))
    for _ in range(2000):
        nested = {"items": nested}
    with pytest.raises(ValueError, match="nested too deeply"):
        ConstraintSpec(json_schema=nested)


def test_definitions_that_are_used_twice_each_are_looked_at_once() -> None:
    levels = {f"a{level}": {"allOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(24)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**levels, "a24": {"type": "integer"}}}
    assert find_refusal(schema) is None
