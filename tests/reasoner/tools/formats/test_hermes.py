"""The format of Hermes and Qwen, by the examples of their documentation, and what is malformed in it."""

from __future__ import annotations

import pytest

from reasoner.tools.formats.answer import ParsedAnswer
from reasoner.tools.formats.call import MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import TOOLS, named_tools

HERMES = FORMATS["hermes"]


def wrap(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def test_qwens_example_of_two_calls() -> None:
    text = """<tool_call>
{"name": "get_current_temperature", "arguments": {"location": "San Francisco, CA, USA"}}
</tool_call>
<tool_call>
{"name": "get_temperature_date", "arguments": {"location": "San Francisco, CA, USA", "date": "2024-10-01"}}
</tool_call>"""
    tools = named_tools("get_current_temperature", "get_temperature_date")
    assert HERMES.parse(text, tools).calls == (
        ToolCall("get_current_temperature", '{"location": "San Francisco, CA, USA"}'),
        ToolCall("get_temperature_date", '{"location": "San Francisco, CA, USA", "date": "2024-10-01"}'),
    )


def test_hermes_example_with_the_arguments_before_the_name() -> None:
    text = wrap('{"arguments": {"symbol": "TSLA"}, "name": "get_stock_fundamentals"}') + "<|im_end|>"
    answer = HERMES.parse(text, named_tools("get_stock_fundamentals"))
    assert answer == ParsedAnswer("", (ToolCall("get_stock_fundamentals", '{"symbol": "TSLA"}'),), "<|im_end|>")


def test_text_before_between_and_after_calls_is_kept() -> None:
    call = wrap('{"name": "get_time", "arguments": {}}')
    answer = HERMES.parse(f" First.\n\n{call}\nThen \n{call}\n\nDone.\n", TOOLS)
    assert (answer.text_before, answer.text_after) == (" First.", "\nThen\nDone.")
    assert answer.calls == (ToolCall("get_time", "{}"),) * 2


@pytest.mark.parametrize("text", ["", " \n", "No call. \n", "a <tool_cal", "1 < 2 <", "<tool_call", "</tool_call>"])
def test_text_without_a_call_is_unchanged(text: str) -> None:
    assert HERMES.parse(text, TOOLS) == ParsedAnswer(text, ())


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "a } b { c ] \\" d \\\\"}',
        '{"city": "\\u00e9\\ud83d\\ude00 </tool_call> <tool_call>"}',
        '{"city":\n  "x",\t"days" : -1.5e3 }',
        '{"city": "é☃ 🙂"}',
        '{"city": {"deep": [[[{"er": "}"}]]]}}',
    ],
)
def test_arguments_are_the_text_as_written(arguments: str) -> None:
    call = HERMES.parse(wrap(f'{{"name": "get_weather", "arguments": {arguments}}}'), TOOLS).calls
    assert call == (ToolCall("get_weather", arguments),)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("", "'{' was expected"),
        ("get_time()", "'{' was expected, not 'get_time"),
        ("{}", "a JSON string was expected, not '}"),
        ('{"name": "get_time"}', "a call has no 'arguments'"),
        ('{"arguments": {}}', "a call has no 'name'"),
        ('{"name": "get_time", "parameters": {}}', "no field 'parameters', only 'name' and 'arguments'"),
        ('{"name": "get_time", "name": "get_time", "arguments": {}}', "has 'name' twice"),
        ('{"name": "get_time", "arguments": {},}', "a JSON string was expected"),
        ('{"name": 5, "arguments": {}}', "a JSON string was expected, not '5"),
        ('{"name": "get_time", "arguments": "{}"}', "a JSON object with the arguments was expected"),
        ('{"name": "get_time", "arguments": [1]}', "a JSON object with the arguments was expected"),
        ('{"name": "get_time", "arguments": null}', "a JSON object with the arguments was expected"),
        ('{"name": "get_time", "arguments": {"a": }}', "not JSON"),
        ('{"name": "get_time", "arguments": {"a": [1}}', "no bracket is closed by '}}"),
        ('{"name": "get_time", "arguments": {"a": 1, "a": 2}}', "give 'a' twice"),
        ('{"name": "get_time", "arguments": {"a": ' + "[" * 200 + "}}", "nested more than 100 deep"),
        ('{"name": "get_\\qtime", "arguments": {}}', "is not a JSON string"),
        ('{"name": "get_time", "arguments": {}}}', "'</tool_call>' was expected, not '}"),
        ('{"name": "get_time", "arguments": {}} {"name": "get_time", "arguments": {}}', "'</tool_call>' was expected"),
        ('{"name": "launch", "arguments": {}}', "no function 'launch'; the functions are get_weather, get_time"),
    ],
)
def test_a_malformed_call_is_refused_with_the_reason(call: str, message: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        HERMES.parse(wrap(call), TOOLS)
    assert message in str(caught.value)


def test_without_tools_every_call_is_refused() -> None:
    with pytest.raises(MalformedCall, match="there are no functions"):
        HERMES.parse(wrap('{"name": "get_time", "arguments": {}}'), ())
