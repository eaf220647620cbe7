"""Mistral's formats, by the texts of mistral-common's tests and its documentation."""

from __future__ import annotations

import pytest

from reasoner.tools.formats.answer import ParsedAnswer
from reasoner.tools.formats.call import MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import TOOLS, named_tools

MISTRAL = FORMATS["mistral"]
TWO = (ToolCall("F1", "{}"), ToolCall("F2", '{"a": 1}'))


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]F1[ARGS]{}[TOOL_CALLS]F2[ARGS]{"a": 1}',
        '[TOOL_CALLS]F1[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]F2[CALL_ID]abc123deg[ARGS]{"a": 1}',
        '[TOOL_CALLS] [{"name": "F1", "arguments": {}, "id": "VvvODy9mT"}, {"name": "F2", "arguments": {"a": 1}}]',
        '[TOOL_CALLS][{"arguments":{},"name":"F1"},{"name":"F2","arguments":{"a": 1}}]\n',
    ],
)
def test_all_versions_are_read(text: str) -> None:
    tools = named_tools("F1", "F2")
    assert MISTRAL.parse(text, tools) == ParsedAnswer("", TWO)
    assert MISTRAL.parse("R1A1 " + text, tools) == ParsedAnswer("R1A1", TWO)


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
def test_a_malformed_call_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        MISTRAL.parse(text, TOOLS)
    assert message in str(caught.value)
