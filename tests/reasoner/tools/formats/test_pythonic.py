"""Llama's list of Python calls, by the examples of its documentation. Literals are the only Python in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reasoner.tools.formats.answer import ParsedAnswer
from reasoner.tools.formats.call import MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import TOOLS, named_tools, values_of

PYTHONIC = FORMATS["pythonic"]


def test_the_documented_example_of_two_calls() -> None:
    text = (
        "[get_weather(city='San Francisco', metric='celsius'), get_weather(city='Seattle', metric='celsius')]<|eot_id|>"
    )
    answer = PYTHONIC.parse(text, TOOLS)
    assert values_of(answer) == [
        ("get_weather", {"city": "San Francisco", "metric": "celsius"}),
        ("get_weather", {"city": "Seattle", "metric": "celsius"}),
    ]
    assert answer.text == "<|eot_id|>"


def test_the_documented_example_of_two_types() -> None:
    answer = PYTHONIC.parse("[get_user_info(user_id=7890, special='black')]", named_tools("get_user_info"))
    assert answer.calls == (ToolCall("get_user_info", '{"user_id": 7890, "special": "black"}'),)


def test_the_documented_example_with_a_tag() -> None:
    answer = PYTHONIC.parse('<|python_tag|>[get_weather(city="San Francisco", metric="celsius")]', TOOLS)
    assert values_of(answer) == [("get_weather", {"city": "San Francisco", "metric": "celsius"})]


@pytest.mark.parametrize(
    "text",
    [
        "[get_time(), get_time()]",
        "[ get_time ( ) ,\n get_time( ), ]",
        "\n\n  [get_time(),get_time()]\n",
        "<|python_start|>[get_time(), get_time()]<|python_end|>",
        "<|python_start|>[get_time()]<|python_end|><|python_start|>[get_time()]<|python_end|>",
        "[get_time()]\n[get_time()]",
    ],
)
def test_spaces_and_tags_make_no_difference(text: str) -> None:
    assert PYTHONIC.parse(text, TOOLS) == ParsedAnswer("", (ToolCall("get_time", "{}"),) * 2)


def test_calls_after_text_begin_a_line() -> None:
    answer = PYTHONIC.parse("I look [it] up:\n[get_time()]", TOOLS)
    assert answer == ParsedAnswer("I look [it] up:", (ToolCall("get_time", "{}"),))


def parse_value(written: str) -> Any:
    (call,) = PYTHONIC.parse(f"[get_weather(city={written}, days=2)]", TOOLS).calls
    arguments = json.loads(call.arguments)
    assert arguments["days"] == 2
    return arguments["city"]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a, b) ] ( [ { \"'", 'a, b) ] ( [ { "'),
        ('"it\'s"', "it's"),
        ('"a \\" b \\\\"', 'a " b \\'),
        ("'\\u00e9\\n\\x41'", "é\nA"),
        ("'\\d+\\.\\w \\['", "\\d+\\.\\w \\["),
        ("r'\\d\\n'", "\\d\\n"),
        ("'''a 'b' \"\"\" )'''", 'a \'b\' """ )'),
        ('"""two\nlines"""', "two\nlines"),
        ("'' 'joined' \"\"", "joined"),
        ("''", ""),
        ("-5", -5),
        ("1.50", 1.5),
        ("1e300", 1e300),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("[1, 'a', [None]]", [1, "a", [None]]),
        ("(1, 2)", [1, 2]),
        ("{'a': {'b': [true]}, \"c\": -1.0}", {"a": {"b": [True]}, "c": -1.0}),
        ("'\\ud800'", "\ud800"),
    ],
)
def test_literals_become_json(written: str, value: object) -> None:
    assert parse_value(written) == value


def test_names_may_be_keywords_of_python() -> None:
    answer = PYTHONIC.parse("[get-trains(from='A', to=\"B\", class=2, in-time=True)]", named_tools("get-trains"))
    assert values_of(answer) == [("get-trains", {"from": "A", "to": "B", "class": 2, "in-time": True})]


@pytest.mark.parametrize(
    "text",
    ["[f(x), g(x)]", "[link](https://example.com)", "[1, 2]", "[]", "[x]", "a [get_time()]", "[get_time", "[f(x"],
)
def test_other_brackets_are_text(text: str) -> None:
    assert PYTHONIC.parse(text, TOOLS) == ParsedAnswer(text, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[launch(city='x')]", "no function 'launch'; the functions are get_weather, get_time"),
        ("[get_weather('Paris')]", "must be given as name=value, not as \"'Paris'\""),
        ("[get_weather(city='Paris', 2)]", "must be given as name=value, not as '2'"),
        ("[get_weather(city='Paris',, days=2)]", "must be given as name=value"),
        ("[get_weather(city=='Paris')]", "must be given as name=value"),
        ("[get_weather(city='a', city='b')]", "give 'city' twice"),
        ("[get_weather(city={'a': 1, 'a': 2})]", "give 'a' twice"),
        ("[get_weather(city={1: 2})]", "keys of an object must be strings"),
        ("[get_weather(city={**x})]", "keys of an object must be strings"),
        ("[get_weather(city=Paris)]", "an argument must be a literal, not 'Paris'"),
        ("[get_weather(city=get_time())]", "an argument must be a literal, not 'get_time()'"),
        ("[get_weather(city=__import__('os').system('true'))]", "an argument must be a literal"),
        ("[get_weather(city=f'{1}')]", "an argument must be a literal"),
        ("[get_weather(city=b'x')]", "an argument must be a literal"),
        ("[get_weather(city=1 + 1)]", "an argument must be a literal"),
        ("[get_weather(city=2j)]", "an argument must be a literal"),
        ("[get_weather(city={1, 2})]", "an argument must be a literal"),
        ("[get_weather(city=1e999)]", "have no JSON"),
        ("[get_weather(city='a' b)]", "is not Python"),
        ("[get_weather(city='a\nb')]", "is not Python"),
        ("[get_weather(city='\\x')]", "is not Python"),
        ("[get_weather(city=" + "9" * 5000 + ")]", "is not Python"),
        ("[get_weather(city=" + "[" * 200 + ")]", "nested more than 100 deep"),
        ("[get_weather(city=" + "-" * 50_000 + "1)]", "is"),
        ("[get_weather(city=" + "1+" * 50_000 + "1)]", "is"),
        ("[get_weather(city=[1)]", "no bracket is closed by ')]'"),
        ("[get_weather(city='Paris'", "are not complete"),
        ("[get_weather(city='Paris)]", "are not complete"),
        ("[get_time()", "',' or ']' was expected, not the end of the text"),
        ("[get_time() get_time()]", "',' or ']' was expected, not 'get_time()]'"),
        ("[get_time(), x]", "'(' is missing"),
        ("<|python_tag|>print(5)", "'[' was expected, not 'print(5)'"),
    ],
)
def test_a_malformed_call_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        PYTHONIC.parse(text, TOOLS)
    assert message in str(caught.value)
