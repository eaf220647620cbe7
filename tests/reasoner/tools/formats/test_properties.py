"""Every format reads what is written by its rules, whole, cut anywhere, and in any pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reasoner.tools.formats.answer import CallDelta, Delta, TextDelta
from reasoner.tools.formats.base import ToolFormat
from reasoner.tools.formats.call import FunctionTool, MalformedCall
from reasoner.tools.formats.registry import FORMATS
from reasoner.tools.formats.stream import CallStream
from tests.reasoner.tools.formats.rendering import RENDERERS, TOOLS, Example, examples, values_of

each_way = pytest.mark.parametrize("way", RENDERERS)

FRAGMENTS = (
    *("{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", ";", "=", "\n", " ", "1", "x", "get_time", "get_weather"),
    *('{"name": "', '", "arguments": ', '", "parameters": ', '"""', "[get_time(", 'city="', "get_time()", "{}"),
    *("<function=", "<parameter=", "</parameter>", "</function>", ">", "assistant", "commentary", " to=functions."),
    *(
        "function",
        "```json\n",
        "\n```",
        '{"name": "get_time", "parameters": {}}',
        '{"name": "get_time", "arguments": {}}',
    ),
)
"""Pieces of calls of all formats, besides their delimiters."""


def read_pieces(
    tool_format: ToolFormat, tools: list[FunctionTool], pieces: list[str]
) -> tuple[CallStream, list[Delta]]:
    stream = CallStream(tool_format, tools)
    deltas = [delta for piece in pieces for delta in stream.feed(piece)]
    return stream, [*deltas, *stream.finish()]


def split(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


@each_way
@settings(max_examples=30)
@given(example=examples())
def test_what_is_written_is_read_back(way: str, example: Example) -> None:
    name, write = RENDERERS[way]
    answer = FORMATS[name].parse(write(example.text, example.calls), example.tools)
    assert values_of(answer) == [(name, dict(arguments)) for name, arguments in example.calls]
    assert (answer.text_before, answer.text_after) == (example.text, "")


@each_way
@settings(max_examples=30)
@given(example=examples(), data=st.data())
def test_a_cut_text_has_only_calls_that_were_complete(way: str, example: Example, data: st.DataObject) -> None:
    name, write = RENDERERS[way]
    text = write(example.text, example.calls)
    whole = FORMATS[name].parse(text, example.tools)
    cut = text[: data.draw(st.integers(0, len(text)))]
    try:
        answer = FORMATS[name].parse(cut, example.tools)
    except MalformedCall:
        return
    assert answer.calls == whole.calls[: len(answer.calls)]


@each_way
@settings(max_examples=30)
@given(example=examples(), cuts=st.lists(st.integers(0, 10_000), max_size=40))
def test_a_stream_in_any_pieces_has_the_calls_of_the_whole_text(way: str, example: Example, cuts: list[int]) -> None:
    name, write = RENDERERS[way]
    text = write(example.text, example.calls)
    whole = FORMATS[name].parse(text, example.tools)
    stream, deltas = read_pieces(FORMATS[name], list(example.tools), split(text, cuts))
    assert stream.answer == whole
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == whole.text
    for index, call in enumerate(whole.calls):
        own = [delta for delta in deltas if isinstance(delta, CallDelta) and delta.index == index]
        assert [delta.name for delta in own] == [call.name] + [None] * (len(own) - 1)
        assert "".join(delta.arguments for delta in own) == call.arguments


@each_way
@settings(max_examples=30)
@given(example=examples(), data=st.data())
def test_no_text_of_a_call_is_shown_as_text(way: str, example: Example, data: st.DataObject) -> None:
    name, write = RENDERERS[way]
    text = write(example.text, example.calls)
    start = FORMATS[name].starts_call(text)
    assert (start is None) == (not example.calls)
    cut = text[: data.draw(st.integers(0, len(text)))]
    shown = list(CallStream(FORMATS[name], example.tools).feed(cut))
    assert example.text.startswith("".join(delta.text for delta in shown if isinstance(delta, TextDelta)))
    early = FORMATS[name].starts_call(cut)
    if start is not None and len(cut) > start:
        assert early == start
    elif early is not None:
        assert cut[early:].strip()  # the beginning of a delimiter may be text


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100)
@given(data=st.data())
def test_no_text_does_worse_than_a_malformed_call(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from((*FORMATS[name].delimiters, *FRAGMENTS)), max_size=14)))
    try:
        whole = FORMATS[name].parse(text, TOOLS)
    except MalformedCall:
        with pytest.raises(MalformedCall):
            read_pieces(FORMATS[name], list(TOOLS), list(text))
    else:
        stream, _ = read_pieces(FORMATS[name], list(TOOLS), list(text))
        assert stream.answer == whole


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_beginning_is_the_one_that_models_write(name: str) -> None:
    tool_format = FORMATS[name]
    write = RENDERERS[name][1]
    text = write("", [("get_weather", {"city": "Paris"})])
    named, any_call = tool_format.force("get_weather"), tool_format.force(None)
    assert named.startswith(any_call)
    begin = text.index(any_call)
    assert text.startswith(named, begin)
    assert values_of(tool_format.parse(text[begin:], TOOLS)) == [("get_weather", {"city": "Paris"})]
