"""Every format reads what is written by its rules, whole and cut anywhere."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.tools.formats.call import MalformedCall
from reasoner.tools.formats.registry import FORMATS
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


@each_way
@given(example=examples())
def test_what_is_written_is_read_back(way: str, example: Example) -> None:
    name, write = RENDERERS[way]
    answer = FORMATS[name].parse(write(example.text, example.calls), example.tools)
    assert values_of(answer) == [(name, dict(arguments)) for name, arguments in example.calls]
    assert (answer.text_before, answer.text_after) == (example.text, "")


@each_way
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


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_no_text_does_worse_than_a_malformed_call(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from((*FORMATS[name].delimiters, *FRAGMENTS)), max_size=14)))
    with contextlib.suppress(MalformedCall):
        FORMATS[name].parse(text, TOOLS)
