"""Harmony, by the examples of its documentation."""

from __future__ import annotations

import pytest

from reasoner.tools.formats.answer import ParsedAnswer
from reasoner.tools.formats.call import MalformedCall, ToolCall
from reasoner.tools.formats.registry import FORMATS
from tests.reasoner.tools.formats.rendering import TOOLS, named_tools

HARMONY = FORMATS["harmony"]
CITY = '{"location":"San Francisco"}'


def test_the_documented_call_after_an_analysis() -> None:
    text = (
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.get_weather <|constrain|>json<|message|>{CITY}<|call|>"
    )
    assert HARMONY.parse(text, TOOLS) == ParsedAnswer("", (ToolCall("get_weather", CITY),))


def test_the_documented_preamble_is_text() -> None:
    plan = "**Action plan**:\n1. Generate an HTML file\n---\nWill start executing the plan step by step"
    arguments = '{"template": "basic_html", "path": "index.html"}'
    text = (
        "<|channel|>analysis<|message|>{long chain of thought}<|end|><|start|>assistant<|channel|>commentary<|message|>"
        f"{plan}<|end|><|start|>assistant<|channel|>commentary to=functions.generate_file<|constrain|>json<|message|>"
        f"{arguments}<|call|>"
    )
    answer = HARMONY.parse(text, named_tools("generate_file"))
    assert answer == ParsedAnswer(plan, (ToolCall("generate_file", arguments),))


def test_the_documented_answer_without_a_call() -> None:
    text = (
        '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.<|end|>\n'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>"
    )
    assert HARMONY.parse(text, TOOLS) == ParsedAnswer("2 + 2 = 4.", ())


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.get_weather<|channel|>commentary json<|message|>",
        "to=functions.get_weather<|channel|>commentary<|message|>",
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.get_weather code<|message|>",
        "<|channel|>analysis to=functions.get_weather <|constrain|>json<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", ""])
def test_the_recipient_may_be_anywhere_in_the_header(header: str, end: str) -> None:
    text = f"{header}{CITY}{end}"
    assert HARMONY.parse(text, TOOLS) == ParsedAnswer("", (ToolCall("get_weather", CITY),))


def test_a_prompt_may_open_the_first_message() -> None:
    assert HARMONY.parse("  The answer is 4.\n", TOOLS).text == "  The answer is 4.\n"
    call = "<|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{}"
    assert HARMONY.parse(f"I look.<|end|>{call}", TOOLS) == ParsedAnswer("I look.", (ToolCall("get_time", "{}"),))


def test_messages_after_a_call_are_read() -> None:
    call = "<|channel|>commentary to=functions.get_time<|message|>{}<|call|>"
    text = "<|start|>assistant".join([call, call, "<|channel|>final<|message|>Done."])
    answer = HARMONY.parse(text, TOOLS)
    assert (len(answer.calls), answer.text_after) == (2, "Done.")


@pytest.mark.parametrize("text", ["<|channel|>", "<|channel|>comm", "<|channel|>final", "<|start|>assistant<|chan"])
def test_the_beginning_of_a_header_is_neither_text_nor_a_call(text: str) -> None:
    assert HARMONY.parse(text, TOOLS) == ParsedAnswer("", ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<|channel|>commentary to=functions.launch<|message|>{}", "no function 'launch'"),
        ("<|channel|>analysis to=python code<|message|>print()", "a call is to 'functions.NAME', not to 'python'"),
        ("<|channel|>commentary to=get_time<|message|>{}", "a call is to 'functions.NAME', not to 'get_time'"),
        ("<|channel|>commentary to=functions.get_time", "'<|message|>' is missing"),
        ("<|channel|>commentary to=functions.get_time<|message|>", "a JSON object with the arguments was expected"),
        ("<|channel|>commentary to=functions.get_time<|message|>{", "are not complete"),
        ("<|channel|>commentary to=functions.get_time<|message|>{} or so", "'<|start|>' was expected, not 'or so'"),
    ],
)
def test_a_malformed_call_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(MalformedCall) as caught:
        HARMONY.parse(text, TOOLS)
    assert message in str(caught.value)
