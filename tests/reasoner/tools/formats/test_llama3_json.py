"""The JSON format of Llama 3, by the examples of its documentation, beside answers that are JSON themselves."""

from __future__ import annotations

import json

import pytest

from reasoner.tools.formats.answer import ParsedAnswer
from reasoner.tools.formats.call import MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import TOOLS, named_tools

LLAMA = FORMATS["llama3_json"]
PARIS = ToolCall("get_weather", '{"city": "Paris"}')
CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'


def test_the_documented_example_with_a_tag() -> None:
    text = """<|python_tag|>{
    "type": "function",
    "name": "trending_songs",
    "parameters": {
        "n": "10",
        "genre": "all"
    }
}<|eom_id|>"""
    answer = LLAMA.parse(text, named_tools("trending_songs"))
    (call,) = answer.calls
    assert (call.name, json.loads(call.arguments)) == ("trending_songs", {"n": "10", "genre": "all"})
    assert answer.text_after == "<|eom_id|>"


@pytest.mark.parametrize(
    "text",
    [CALL, f"\n\n{CALL}", f"  {CALL}\n", f"<|python_tag|>{CALL}", f"<|python_tag|>{CALL};", CALL.replace(" ", "\n")],
)
def test_a_call_with_and_without_a_tag(text: str) -> None:
    (call,) = LLAMA.parse(text, TOOLS).calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("separator", ["; ", ";", "\n", ";\n\n"])
def test_several_calls_are_separated_by_semicolons_or_lines(separator: str) -> None:
    assert LLAMA.parse(separator.join([CALL] * 3), TOOLS) == ParsedAnswer("", (PARIS,) * 3)


def test_calls_after_text_begin_a_line() -> None:
    assert LLAMA.parse(f"I will look.\n\n{CALL}", TOOLS) == ParsedAnswer("I will look.", (PARIS,))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"answer": 5}',
        '{"name": "get_weather"}',
        f"The call is {CALL}",
        "{x | x > 1}",
        '{"name": ["get_weather"], "parameters": {}}',
        '{"name": "get_weather", "para',
    ],
)
def test_other_json_is_text(text: str) -> None:
    assert LLAMA.parse(text, TOOLS) == ParsedAnswer(text, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "launch", "parameters": {}}', "no function 'launch'"),
        ('{"name": "get_weather", "parameters": "Paris"}', "a JSON object with the arguments was expected"),
        ('{"name": "get_weather", "parameters": {"city": "Paris"}', "was expected, not the end of the text"),
        ('{"name": "get_weather", "parameters": {"city": "Paris', "are not complete"),
        ('{"name": "get_weather", "parameters": {}, "arguments": {}}', "has 'arguments' twice"),
        ('<|python_tag|>brave_search.call(query="x")', "'{' was expected, not 'brave_search"),
        (f"{CALL}; and more", "'{' was expected, not 'and more'"),
    ],
)
def test_a_malformed_call_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        LLAMA.parse(text, TOOLS)
    assert message in str(caught.value)
