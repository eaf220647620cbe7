"""A stream shows what is certain as soon as it is, and nothing before."""

from __future__ import annotations

import pytest

from reasoner.tools.formats.answer import CallDelta, Delta, ParsedAnswer, TextDelta
from reasoner.tools.formats.call import MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from reasoner.tools.formats.stream import CallStream
from tests.reasoner.tools.formats.rendering import TOOLS

Step = tuple[str, list[Delta]]


def start(index: int, name: str) -> CallDelta:
    return CallDelta(index, name, "")


def more(index: int, arguments: str) -> CallDelta:
    return CallDelta(index, None, arguments)


STEPS: dict[str, list[Step]] = {
    "hermes": [
        ("I look", [TextDelta("I look")]),
        (" up <", [TextDelta(" up")]),
        ("b> <tool", [TextDelta(" <b>")]),
        ('_call>\n{"name": "get_wea', []),
        ('ther", "argu', [start(0, "get_weather")]),
        ('ments": {"ci', [more(0, '{"ci')]),
        ('ty": "a}', [more(0, 'ty": "a}')]),
        ('\\"', [more(0, '\\"')]),
        ('"}', [more(0, '"}')]),
        ("}\n</tool_call>\n", []),
        ("Done", [TextDelta("\nDone")]),
    ],
    "qwen_xml": [
        ("<tool_call>\n<function=get_weather", []),
        (">\n<parameter=days>\n2", [start(0, "get_weather")]),
        ("\n</parameter>", [more(0, '{"days": 2')]),
        ("\n<parameter=city>\nRome\n</parameter>\n</function>", [more(0, ', "city": "Rome"'), more(0, "}")]),
        ("\n</tool_call>", []),
    ],
    "llama3_json": [
        ("{", []),
        ('"name": "Bob", ', []),
        ('"age": 3}\n', [TextDelta('{"name": "Bob", "age": 3}')]),
        ('{"name": "get_time", "parameters"', []),
        (":", [start(0, "get_time")]),
        (" {}}", [more(0, "{}")]),
    ],
    "mistral": [
        ("Well [TOOL", [TextDelta("Well")]),
        ("_CALLS]get_time[AR", []),
        ("GS]", [start(0, "get_time")]),
        ("{", [more(0, "{")]),
        ("}[TOOL_CALLS]get_time[ARGS]{}", [more(0, "}"), start(1, "get_time"), more(1, "{}")]),
    ],
    "harmony": [
        ("<|channel|>analysis<|message|>Hm", []),
        ("m<|end|><|start|>assistant<|channel|>comm", []),
        ("entary<|message|>I look", [TextDelta("I look")]),
        ("<|end|><|start|>assistant<|channel|>commentary to=functions.get_time", []),
        ("<|message|>{", [start(0, "get_time"), more(0, "{")]),
        ("}<|call|>", [more(0, "}")]),
    ],
    "pythonic": [
        ("[get_weather(", []),
        ("city=", [start(0, "get_weather")]),
        ("'a)', days=2", []),
        (")", [more(0, '{"city": "a)", "days": 2}')]),
        (", get_time()", [start(1, "get_time"), more(1, "{}")]),
        ("]", []),
    ],
}


@pytest.mark.parametrize("name", STEPS)
def test_deltas_come_with_the_piece_that_makes_them_certain(name: str) -> None:
    stream = CallStream(FORMATS[name], TOOLS)
    for piece, deltas in STEPS[name]:
        assert (piece, list(stream.feed(piece))) == (piece, deltas)
    assert list(stream.finish()) == []
    assert stream.answer == FORMATS[name].parse("".join(piece for piece, _ in STEPS[name]), TOOLS)


def test_what_was_held_back_is_shown_at_the_end() -> None:
    stream = CallStream(FORMATS["hermes"], TOOLS)
    assert list(stream.feed("a \n<tool_")) == [TextDelta("a")]
    assert list(stream.finish()) == [TextDelta(" \n<tool_")]
    assert stream.answer == ParsedAnswer("a \n<tool_", ())


def test_deltas_before_a_malformed_call_are_delivered_and_the_error_stays() -> None:
    stream = CallStream(FORMATS["mistral"], TOOLS)
    deltas = stream.feed("Hi[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]launch[ARGS]{}")
    assert [next(deltas) for _ in range(3)] == [TextDelta("Hi"), start(0, "get_time"), more(0, "{}")]
    with pytest.raises(MalformedCall, match="no function 'launch'"):
        next(deltas)
    for again in (stream.feed("x"), stream.finish()):
        with pytest.raises(MalformedCall, match="no function 'launch'"):
            list(again)
    with pytest.raises(MalformedCall, match="no function 'launch'"):
        _ = stream.answer


def test_a_call_that_is_cut_is_malformed_at_the_end() -> None:
    stream = CallStream(FORMATS["hermes"], TOOLS)
    list(stream.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa'))
    with pytest.raises(MalformedCall, match="not complete"):
        list(stream.finish())


def test_an_answer_needs_the_end() -> None:
    stream = CallStream(FORMATS["hermes"], TOOLS)
    list(stream.feed("a"))
    with pytest.raises(RuntimeError, match="finish the stream"):
        _ = stream.answer


def test_deltas_that_were_not_iterated_come_later() -> None:
    stream = CallStream(FORMATS["mistral"], TOOLS)
    stream.feed("[TOOL_CALLS]get_time[ARGS]")
    assert list(stream.feed("{}")) == [start(0, "get_time"), more(0, "{}")]
    list(stream.finish())
    assert stream.answer.calls == (ToolCall("get_time", "{}"),)
