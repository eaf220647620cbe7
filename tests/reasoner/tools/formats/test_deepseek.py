"""DeepSeek's formats, by its chat templates."""

from __future__ import annotations

import pytest

from reasoner.tools.formats.answer import ParsedAnswer
from reasoner.tools.formats.call import MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import TOOLS, deepseek_token, named_tools

DEEPSEEK = FORMATS["deepseek"]
BEGIN, END = deepseek_token("calls begin"), deepseek_token("calls end")
CALL, CALL_END, SEP = deepseek_token("call begin"), deepseek_token("call end"), deepseek_token("sep")
CITY = '{"city": "Paris"}'
BLOCK = f"{CALL}function{SEP}get_weather\n```json\n{CITY}\n```{CALL_END}"
PLAIN = f"{CALL}get_weather{SEP}{CITY}{CALL_END}"
PARIS = ToolCall("get_weather", CITY)


@pytest.mark.parametrize("call", [BLOCK, PLAIN], ids=["block", "plain"])
@pytest.mark.parametrize("separator", ["", "\n"])
def test_all_versions_are_read(call: str, separator: str) -> None:
    text = f"I look.\n{BEGIN}{separator}{call}{separator}{call}{separator}{END}"
    assert DEEPSEEK.parse(text, TOOLS) == ParsedAnswer("I look.", (PARIS, PARIS))


def test_the_last_token_may_be_missing() -> None:
    assert DEEPSEEK.parse(BEGIN + BLOCK, TOOLS).calls == (PARIS,)
    assert DEEPSEEK.parse(BEGIN + PLAIN + "\n", TOOLS).calls == (PARIS,)


def test_a_function_may_be_named_function() -> None:
    text = f"{BEGIN}{CALL}function{SEP}{{}}{CALL_END}{END}"
    assert DEEPSEEK.parse(text, named_tools("function")).calls == (ToolCall("function", "{}"),)


def test_arguments_may_hold_a_fence() -> None:
    arguments = '{"city": "```json\\n{}\\n```"}'
    text = BEGIN + BLOCK.replace(CITY, arguments) + END
    assert DEEPSEEK.parse(text, TOOLS).calls == (ToolCall("get_weather", arguments),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BEGIN, f"{CALL!r} was expected, not the end of the text"),
        (f"{BEGIN}{CALL}get_time", f"{SEP!r} is missing"),
        (f"{BEGIN}{CALL}get_time{SEP}now", "the arguments of 'get_time' was expected, not 'now'"),
        (f"{BEGIN}{CALL}launch{SEP}{{}}{CALL_END}", "no function 'launch'"),
        (f"{BEGIN}{CALL}function{SEP}launch\n```json\n{{}}\n```{CALL_END}", "no function 'launch'"),
        (f"{BEGIN}{CALL}function{SEP}get_time\n{{}}{CALL_END}", "'```json' was expected"),
        (f"{BEGIN}{CALL}function{SEP}get_time\n```json\n{{}}{CALL_END}", "'```' was expected"),
        (f"{BEGIN}{CALL}get_time{SEP}{{}}", f"{CALL_END!r} was expected, not the end of the text"),
        (f"{BEGIN}{PLAIN}and", f"{CALL!r} or {END!r} was expected, not 'and'"),
    ],
)
def test_a_malformed_call_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        DEEPSEEK.parse(text, TOOLS)
    assert message in str(caught.value)
