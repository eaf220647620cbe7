"""Calls are equal when their functions and the values of their arguments are, whatever the JSON looks like."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.tools.formats.call import (
    MalformedCall,
    ToolCall,
    Vote,
    canonicalize_arguments,
    check_arguments,
    vote_key,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
        ('{"n": 1}', '{"n": 1.0}'),
        ('{"n": 100}', '{"n": 1e2}'),
        ('{"n": 0.1}', '{"n": 10E-2}'),
        ('{"n": 0}', '{"n": -0.0e7}'),
        ('{"n": 12300000000000000000001}', '{"n": 12300000000000000000001.00}'),
        ('{"s": "é"}', '{"s": "\\u00e9"}'),
        ('{"s": "\\/"}', '{"s": "/"}'),
        ('{"a": {"x": [1, {"z": null, "y": true}]}}', ' {"a":{"x":[1.0,{"y":true,"z":null}]}}\n'),
    ],
)
def test_equal_arguments_have_one_canonical_text(one: str, other: str) -> None:
    assert canonicalize_arguments(one) == canonicalize_arguments(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"n": 1}', '{"n": "1"}'),
        ('{"n": 1}', '{"n": true}'),
        ('{"n": 0}', '{"n": false}'),
        ('{"n": 1}', '{"n": -1}'),
        ('{"n": 12300000000000000000001}', '{"n": 12300000000000000000002}'),
        ('{"n": [1, 2]}', '{"n": [2, 1]}'),
        ('{"n": null}', "{}"),
        ('{"s": "1e1"}', '{"s": 10}'),
    ],
)
def test_different_arguments_have_different_texts(one: str, other: str) -> None:
    assert canonicalize_arguments(one) != canonicalize_arguments(other)


@given(VALUES)
def test_a_canonical_text_is_json_of_the_same_value(value: Any) -> None:
    text = json.dumps(value)
    canonical = canonicalize_arguments(text)
    assert canonicalize_arguments(canonical) == canonical
    assert json.loads(canonical, parse_int=Decimal, parse_float=Decimal) == json.loads(
        text, parse_int=Decimal, parse_float=Decimal
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "not JSON"),
        ('{"a": 1,}', "not JSON"),
        ("{'a': 1}", "not JSON"),
        ('{"a": NaN}', "has no NaN"),
        ('{"a": -Infinity}', "has no -Infinity"),
        ('{"a": 1, "a": 2}', "give 'a' twice"),
        ('{"a": {"b": 1, "b": 1}}', "give 'b' twice"),
        ("[1]", "must be a JSON object"),
        ('"{}"', "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"a": "line\nbreak"}', "not JSON"),
        ('{"a":' + "[" * 100_000, "nested more than 100 deep"),
        ('{"a": 1e' + "9" * 5000 + "}", "not JSON"),
        ('{"a": 1e999}', "a value that clients cannot read"),
        ('{"a": "\\ud800"}', "a value that clients cannot read"),
        ('{"a": ' + "7" * 5000 + "}", "a value that clients cannot read"),
    ],
)
def test_arguments_that_are_no_object_are_malformed(arguments: str, message: str) -> None:
    with pytest.raises(MalformedCall, match=message):
        check_arguments(arguments)


def test_an_integer_of_many_digits_is_compared_by_value() -> None:
    digits = "7" * 10_000
    assert canonicalize_arguments(f'{{"n": {digits}}}') == canonicalize_arguments(f'{{"n": {digits}.0}}')


PARIS, ROME = ToolCall("get_weather", '{"city": "Paris", "days": 1}'), ToolCall("get_weather", '{"city": "Rome"}')
PARIS_AGAIN = ToolCall("get_weather", '{"days": 1.0, "city": "Paris"}')
TIME = ToolCall("get_time", "{}")


@pytest.mark.parametrize(
    ("vote", "one", "other", "is_equal"),
    [
        ("name", [PARIS, TIME], [TIME, ROME], True),
        ("name", [PARIS], [PARIS, PARIS], False),
        ("name", [PARIS], [TIME], False),
        ("name", [], [TIME], False),
        ("arguments", [PARIS, TIME], [TIME, PARIS_AGAIN], True),
        ("arguments", [PARIS], [ROME], False),
        ("arguments", [PARIS, PARIS_AGAIN], [PARIS], False),
        ("arguments", [ToolCall("other", PARIS.arguments)], [PARIS], False),
        ("exact", [PARIS, TIME], [PARIS, TIME], True),
        ("exact", [PARIS, TIME], [TIME, PARIS], False),
        ("exact", [PARIS], [PARIS_AGAIN], False),
    ],
)
def test_votes_count_calls_as_equal_by_their_kind(
    vote: Vote, one: list[ToolCall], other: list[ToolCall], is_equal: bool
) -> None:
    assert (vote_key(one, vote) == vote_key(other, vote)) == is_equal
