"""The format of Qwen3-Coder, by the example of its chat template, and values by the types of the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reasoner.tools.formats.call import FunctionTool, MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import TOOLS, named_tools

QWEN = FORMATS["qwen_xml"]


def test_the_example_of_the_chat_template() -> None:
    text = """<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>"""
    (call,) = QWEN.parse(text, named_tools("example_function_name")).calls
    lines = "This is the value for the second parameter\nthat can span\nmultiple lines"
    assert json.loads(call.arguments) == {"example_parameter_1": "value_1", "example_parameter_2": lines}


def test_two_calls_after_text() -> None:
    text = """I will look.
<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>
<tool_call>
<function=get_time>
</function>
</tool_call>"""
    answer = QWEN.parse(text, TOOLS)
    assert answer.text_before == "I will look."
    assert answer.calls == (ToolCall("get_weather", '{"city": "Paris", "days": 2}'), ToolCall("get_time", "{}"))


def test_the_outer_tags_may_be_missing() -> None:
    text = "Sure.\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    answer = QWEN.parse(text, TOOLS)
    assert (answer.text, answer.calls) == ("Sure.", (ToolCall("get_weather", '{"city": "Rome"}'),))


def parse_value(schema: object, written: str, root: dict[str, Any] | None = None) -> Any:
    tool = FunctionTool("f", "", {"type": "object", "properties": {"x": schema}, **(root or {})})
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = QWEN.parse(text, [tool]).calls
    return json.loads(call.arguments)["x"]


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "\n two \n", "\n two \n"),
        ({"type": "string"}, 'a "quoted" \\ <b>é</b>', 'a "quoted" \\ <b>é</b>'),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "7", 7),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, '[1, {"a": "]"}]', [1, {"a": "]"}]),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "none of it", "none of it"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five", "five"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({}, "5", "5"),
        (True, "5", "5"),
    ],
)
def test_values_have_the_type_of_the_schema(schema: object, written: str, value: object) -> None:
    parsed = parse_value(schema, written)
    assert (parsed, type(parsed)) == (value, type(value))


def test_references_within_the_schema_are_followed() -> None:
    definitions = {"$defs": {"a/b": {"$ref": "#/$defs/n"}, "n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert parse_value({"$ref": "#/$defs/a~1b"}, "5", definitions) == 5
    assert parse_value({"$ref": "#/$defs/loop"}, "5", definitions) == "5"
    assert parse_value({"$ref": "https://example.com/n"}, "5", definitions) == "5"
    assert parse_value({"$ref": "#/$defs/missing/n"}, "5", definitions) == "5"


@pytest.mark.parametrize(
    ("schema", "written", "expected"),
    [
        ({"type": "integer"}, "five", "integer"),
        ({"type": "integer"}, "5.5", "integer"),
        ({"type": "integer"}, "\u0665", "integer"),
        ({"type": "number"}, "inf", "number"),
        ({"type": "number"}, "1,5", "number"),
        ({"type": "boolean"}, "yes", "boolean"),
        ({"type": "array"}, "{}", "array"),
        ({"type": "array"}, "[NaN]", "array"),
        ({"type": "object"}, "{'a': 1}", "object"),
        ({"type": "object"}, '{"a": 1, "a": 2}', "object"),
        ({"type": ["integer", "null"]}, "x", "null or integer"),
    ],
)
def test_a_value_of_another_type_is_malformed(schema: object, written: str, expected: str) -> None:
    with pytest.raises(MalformedCall, match=f"argument 'x' of 'f' must be of type {expected}, not "):
        parse_value(schema, written)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>\n{}", "'<function=' was expected"),
        ("<tool_call><function=launch></function></tool_call>", "no function 'launch'"),
        ("<tool_call><function=get_time>now</function></tool_call>", "'<parameter=' or '</function>' was expected"),
        ("<tool_call><function=get_time></function>", "'</tool_call>' was expected, not the end of the text"),
        ("<tool_call><function=get_time", "'>' is missing after 'get_time'"),
        ("<function=get_time><parameter=a>1", "'</parameter>' is missing"),
        ("<function=get_time><parameter=a>1</parameter><parameter=a>1</parameter></function>", "give 'a' twice"),
    ],
)
def test_a_malformed_call_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        QWEN.parse(text, TOOLS)
    assert message in str(caught.value)
