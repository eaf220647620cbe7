"""Mistral's formats, by the texts of mistral-common's tests and its documentation."""

from __future__ import annotations

import pytest

from reasoner.tools.formats.answer import ParsedAnswer
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.call import MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import TOOLS, named_tools

each_format = pytest.mark.parametrize(
    "tool_format", [FORMATS["mistral"], FORMATS["mistral_list"]], ids=lambda f: f.name
)
TWO = (ToolCall("F1", "{}"), ToolCall("F2", '{"a": 1}'))


@each_format
@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]F1[ARGS]{}[TOOL_CALLS]F2[ARGS]{"a": 1}',
        '[TOOL_CALLS]F1[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]F2[CALL_ID]abc123deg[ARGS]{"a": 1}',
        '[TOOL_CALLS] [{"name": "F1", "arguments": {}, "id": "VvvODy9mT"}, {"name": "F2", "arguments": {"a": 1}}]',
        '[TOOL_CALLS][{"arguments":{},"name":"F1"},{"name":"F2","arguments":{"a": 1}}]\n',
    ],
)
def test_both_formats_read_all_versions(tool_format: ToolFormat, text: str) -> None:
    tools = named_tools("F1", "F2")
    assert tool_format.parse(text, tools) == ParsedAnswer("", TWO)
    assert tool_format.parse("R1A1 " + text, tools) == ParsedAnswer("R1A1", TWO)


def test_each_version_is_forced_in_its_own_way() -> None:
    assert FORMATS["mistral"].force("F1") == "[TOOL_CALLS]F1[ARGS]"
    assert FORMATS["mistral_list"].force("F1") == '[TOOL_CALLS] [{"name": "F1", "arguments":'


@each_format
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[TOOL_CALLS]", "'[CALL_ID]' or '[ARGS]' is missing"),
        ("[TOOL_CALLS]get_time", "'[CALL_ID]' or '[ARGS]' is missing after 'get_time'"),
        ("[TOOL_CALLS]get_time{}", "'[CALL_ID]' or '[ARGS]' is missing"),
        ("[TOOL_CALLS]get_time[CALL_ID]abc", "'[ARGS]' is missing"),
        ("[TOOL_CALLS]launch[ARGS]{}", "no function 'launch'"),
        ('[TOOL_CALLS]get_time[ARGS]"blabla"', "a JSON object with the arguments was expected"),
        ("[TOOL_CALLS]get_time[ARGS]{", "are not complete"),
        ("[TOOL_CALLS] []", "'{' was expected"),
        ('[TOOL_CALLS] [{"name": "get_time", "arguments": {}}', "',' or ']' was expected, not the end of the text"),
        ('[TOOL_CALLS] {"name": "get_time", "arguments": {}}', "is missing"),
    ],
)
def test_a_malformed_call_is_refused_with_the_reason(tool_format: ToolFormat, text: str, message: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        tool_format.parse(text, TOOLS)
    assert message in str(caught.value)
