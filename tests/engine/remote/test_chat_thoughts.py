"""Thoughts on servers that only chat: their text, their tokens, their limits, and what is sent back of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.types import (
    Branch,
    Completion,
    Delta,
    EngineClient,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    NotSupported,
    TokenizeRequest,
)
from engine.remote.chat.encoding import (
    Conversation,
    decode_prompt,
    decode_text,
    encode_answer,
    encode_prompt,
    encode_text,
    measure_thought,
)
from engine.remote.chat.options import ChatOptions
from engine.remote.http import HttpEngine
from tests.engine.remote.test_chat import MESSAGES, Hosted, fresh, said, stream, usage

__all__ = ["fresh"]  # the fixture holds here, too

THOUGHT = "<think>\nThree and four.\n</think>\n\n"


def thinks(text: str, field: str = "reasoning_content") -> dict[str, Any]:
    return said("", None, **{"content": None, field: text})


def details(reasoning: int) -> dict[str, Any]:
    return {"completion_tokens_details": {"reasoning_tokens": reasoning}}


async def one_of(*chunks: dict[str, Any], options: ChatOptions | None = None, **branch: Any) -> Completion:
    hosted = Hosted(lambda _: stream(*chunks), options)
    [one] = await hosted.generate(Branch(1, 1, 100, **branch))
    await hosted.engine.close()
    return one


def parts_of(one: Completion) -> tuple[str, str, int, int]:
    """Return the texts of the thought and of the answer, and the tokens of each."""
    assert one.thought is not None
    num_chars, num_tokens = one.thought
    return one.text[:num_chars], one.text[num_chars:], num_tokens, len(one.token_ids) - num_tokens


# Encoding.


@given(st.text(), st.text(), st.none() | st.integers(0, 60), st.none() | st.integers(0, 80))
def test_a_thought_and_its_answer_come_back_in_as_many_tokens_as_are_billed(
    thought: str, answer: str, reported: int | None, reported_thought: int | None
) -> None:
    ids = encode_answer(thought, answer, reported, reported_thought)
    assert decode_text(ids) == thought + answer
    num_chars, num_thought = measure_thought(ids)
    assert num_chars == len(thought)
    least = [-(-len(text.encode()) // 32) for text in (thought, answer)]
    if reported is not None:
        assert len(ids) == max(reported, sum(least))
    assert num_thought >= least[0]
    assert len(ids) - num_thought >= least[1]
    if reported_thought and least[0] <= reported_thought <= len(ids) - least[1]:
        assert num_thought == reported_thought
    assert decode_prompt(encode_prompt(MESSAGES) + ids) == Conversation(MESSAGES, {}, thought + answer, answer)


def test_a_text_after_hidden_reasoning_in_its_middle_is_all_answer() -> None:
    ids = encode_answer("thought", "one ", 9, 5) + encode_answer("", "two", 7, 4)
    assert measure_thought(ids) == (7, 9)
    assert decode_prompt(encode_prompt(MESSAGES) + ids).answer == "one two"


# Answers.


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_in_a_field_of_its_own_is_the_thought_before_the_answer(field: str) -> None:
    one = await one_of(
        thinks("Three ", field),
        thinks("and four.", field),
        said("\n\n"),
        said("It is 7.", "stop"),
        usage(9, 50, **details(43)),
    )
    assert parts_of(one) == (THOUGHT, "It is 7.", 43, 7)
    assert (decode_text(one.token_ids), one.finish_reason) == (one.text, "stop")


async def test_a_server_that_sends_both_fields_has_said_it_once() -> None:
    chunk = said("", None, reasoning="Three and four.", reasoning_content="Three and four.")
    one = await one_of(chunk, said("7", "stop"), usage(9, 50))
    assert one.text == f"{THOUGHT}7"


async def test_deltas_are_the_thought_and_the_answer_with_the_delimiters_between_them() -> None:
    hosted = Hosted(lambda _: stream(thinks("Three and "), thinks("four."), said("7"), said(".", "stop"), usage(9, 50)))
    request = GenerateRequest("r", "m", encode_prompt("?"), (Branch(1, 1, 99),))
    events = [event async for event in hosted.engine.generate(request, stream=True)]
    [one] = [event for event in events if isinstance(event, Completion)]
    assert "".join(event.text for event in events if isinstance(event, Delta)) == one.text == f"{THOUGHT}7."
    await hosted.engine.close()


@pytest.mark.parametrize(
    ("thought", "answer"),
    [
        ("<think>\nThree and four.\n</think>\n\n", "It is 7 </think>."),
        ("\n<think>Three and four.</think>", "It is 7."),
        ("Three and four, and the template has opened it.\n</think>\n\n", "It is 7."),
        ("<think>\nThree and four, without an end", ""),
        ("", "It is 7, and <think> is a tag, which </think> closes."),
    ],
)
async def test_a_thought_within_the_content_is_found_by_its_delimiters(thought: str, answer: str) -> None:
    whole = thought + answer
    one = await one_of(said(whole[:9]), said(whole[9:], "stop"), usage(9, 50, **details(40 if thought else 0)))
    assert parts_of(one) == (thought, answer, 40 if thought else 0, 10 if thought else 50)


async def test_hidden_reasoning_is_an_empty_thought_of_the_tokens_that_are_billed() -> None:
    one = await one_of(said("It is 7.", "stop"), usage(9, 35, **details(30)))
    assert parts_of(one) == ("", "It is 7.", 30, 5)


async def test_tokens_are_shared_by_length_where_the_server_does_not_tell_those_of_the_thought() -> None:
    for told in ({}, details(0)):
        one = await one_of(thinks("x" * 81), said("y" * 100, "stop"), usage(9, 40, **told))
        thought, _, num_thought, num_answer = parts_of(one)
        assert len(thought) == 100
        assert (num_thought, num_answer) == (20, 20)


async def test_a_report_of_more_reasoning_than_tokens_leaves_what_the_answer_needs() -> None:
    one = await one_of(thinks("Three and four."), said("y" * 64, "stop"), usage(9, 20, **details(99)))
    assert parts_of(one)[2:] == (18, 2)


async def test_an_answer_that_ends_in_its_thought_is_all_thought() -> None:
    one = await one_of(thinks("Three and"), said("", "length"), usage(9, 100, **details(100)))
    assert parts_of(one) == ("<think>\nThree and", "", 100, 0)


async def test_a_stop_string_in_the_thought_is_part_of_it() -> None:
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "four"}]}
    one = await one_of(thinks("Three and "), ended, usage(9, 5))
    assert parts_of(one)[:2] == ("<think>\nThree and four", "")
    assert one.stop == "four"


# Interruptions.


@pytest.mark.parametrize("prefill", ["none", "last_message", "prefix", "continue_final_message"])
async def test_a_stream_that_is_cut_in_the_thought_begins_again(prefill: Any) -> None:
    answers = iter(
        [
            stream(thinks("Thr"), thinks("ee"), is_cut=True),
            stream(thinks("Three and four."), said("7", "stop"), usage(9, 8, **details(6))),
        ]
    )
    hosted = Hosted(lambda _: next(answers), ChatOptions(("m",), prefill=prefill))
    [one] = await hosted.generate(Branch(1, 1, 20))
    assert [body["messages"] for body in hosted.bodies] == [MESSAGES, MESSAGES]
    assert parts_of(one) == (THOUGHT, "7", 2 + 6, 2)
    assert hosted.bodies[1]["max_completion_tokens"] == 18
    await hosted.engine.close()


@pytest.mark.parametrize("is_inline", [False, True])
async def test_a_stream_that_is_cut_in_the_answer_goes_on_after_the_content_alone(is_inline: bool) -> None:
    first = [said(f"{THOUGHT}3 + 4")] if is_inline else [thinks("Three and four."), said("3 + 4")]
    answers = iter([stream(*first, is_cut=True), stream(said(" = 7", "stop"), usage(9, 3))])
    hosted = Hosted(lambda _: next(answers), ChatOptions(("m",), prefill="last_message"))
    [one] = await hosted.generate(Branch(1, 1, 20))
    assert hosted.bodies[1]["messages"] == [*MESSAGES, {"role": "assistant", "content": "3 + 4"}]
    assert [body["max_completion_tokens"] for body in hosted.bodies] == [20, 17]  # no fewer than the text can have
    assert parts_of(one) == (THOUGHT, "3 + 4 = 7", 2, 1 + 3)
    await hosted.engine.close()


async def test_a_stream_that_is_cut_twice_in_the_answer_keeps_its_beginning() -> None:
    answers = iter(
        [
            stream(thinks("Three and four."), said("3 + 4"), is_cut=True),
            stream(is_cut=True),
            stream(said(" = 7", "stop"), usage(9, 3)),
        ]
    )
    hosted = Hosted(lambda _: next(answers), ChatOptions(("m",), prefill="prefix"))
    [one] = await hosted.generate(Branch(1, 1, 20))
    assert one.text == f"{THOUGHT}3 + 4 = 7"
    await hosted.engine.close()


@pytest.mark.parametrize(("prefill", "answer"), [("prefix", "3 + 4 = 7"), ("continue_final_message", "3 + 4 is = 7")])
async def test_reasoning_after_the_beginning_of_an_answer_is_text_only_where_the_server_goes_on_literally(
    prefill: Any, answer: str
) -> None:
    answers = iter(
        [
            stream(thinks("Three and four."), said("3 + 4"), is_cut=True),
            stream(thinks(" is"), said(" = 7", "stop"), usage(9, 6, **details(3))),
        ]
    )
    hosted = Hosted(lambda _: next(answers), ChatOptions(("m",), prefill=prefill))
    [one] = await hosted.generate(Branch(1, 1, 20))
    assert parts_of(one)[:2] == (THOUGHT, answer)
    await hosted.engine.close()


async def test_a_search_that_goes_on_sends_the_content_alone_but_a_thought_without_an_end_as_it_is() -> None:
    options = ChatOptions(("m",), prefill="continue_final_message")
    cut = encode_answer("<think>\nThree and", "", 5, 5)
    for end, written, content in (
        (thinks(" four."), cut, "<think>\nThree and"),
        (said(" four.\n</think>\n\n"), cut, "<think>\nThree and"),
        (said("The sum"), encode_answer(THOUGHT, "So: ", 9, 6), "So: "),
        (said("The sum"), cut + encode_text("\n</think>\n\nSo: "), "<think>\nThree and\n</think>\n\nSo: "),
    ):
        hosted = Hosted(lambda _, end=end: stream(end, said(" is 7.", "stop"), usage(9, 8)), options)  # type: ignore[misc]
        [one] = await hosted.generate(Branch(1, 1, 50, written))
        assert hosted.bodies[0]["messages"][-1] == {"role": "assistant", "content": content}
        if content == "<think>\nThree and":
            assert parts_of(one)[:2] == (" four.\n</think>\n\n", " is 7.")
        else:
            assert parts_of(one)[:2] == ("", "The sum is 7.")
        await hosted.engine.close()


# Variables of the template.


@pytest.mark.parametrize(
    ("prefill", "variables", "fields"),
    [
        ("none", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            "continue_final_message",
            {"reasoning_effort": "low", "enable_thinking": False},
            {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False}},
        ),
    ],
)
async def test_variables_of_the_template_are_sent_in_the_field_of_the_server(
    prefill: Any, variables: dict[str, object], fields: dict[str, Any]
) -> None:
    hosted = Hosted(lambda _: stream(said("7", "stop"), usage(9, 1)), ChatOptions(("m",), prefill=prefill))
    for kwargs in (variables, {}):
        prompt = await hosted.engine.tokenize(TokenizeRequest("m", MESSAGES, template_kwargs=kwargs))
        await hosted.generate(Branch(1, 1, 9), prompt=prompt)
    sent, plain = hosted.bodies
    assert sent == plain | fields
    assert sent["messages"] == MESSAGES
    await hosted.engine.close()


async def test_a_variable_without_a_field_is_refused_by_name_with_what_there_is() -> None:
    hosted = Hosted(lambda _: stream())
    with pytest.raises(
        InvalidRequest, match=r"no field for 'enable_thinking'.* reasoning_effort alone.*prefill = "
    ) as e:
        await hosted.engine.tokenize(
            TokenizeRequest("m", MESSAGES, template_kwargs={"reasoning_effort": "low", "enable_thinking": 0})
        )
    assert e.value.field == "chat_template_kwargs"
    await hosted.engine.close()


# Limits.


async def limited(options: ChatOptions, limit: int | None, max_tokens: int = 9000) -> dict[str, Any]:
    """Return the body of a request with a limit."""
    hosted = Hosted(lambda _: stream(said("7", "stop"), usage(9, 1)), options)
    request = GenerateRequest("r", "m", encode_prompt("?"), (Branch(1, 1, max_tokens),), thinking_limit=limit)
    assert [event async for event in hosted.engine.generate(request)]
    await hosted.engine.close()
    return hosted.bodies[0]


@pytest.mark.parametrize(
    ("kind", "limit", "max_tokens", "fields"),
    [
        ("thinking", 2000, 9000, {"thinking": {"type": "enabled", "budget_tokens": 2000}}),
        ("thinking", 2000, 1500, {"thinking": {"type": "enabled", "budget_tokens": 1499}}),
        ("thinking", 2000, 1024, {"thinking": {"type": "disabled"}}),
        ("thinking", 500, 9000, {"thinking": {"type": "enabled", "budget_tokens": 500}}),
        ("thinking", 0, 9000, {"thinking": {"type": "disabled"}}),
        ("reasoning", 2000, 9000, {"reasoning": {"max_tokens": 2000}}),
        ("reasoning", 0, 9000, {"reasoning": {"effort": "none"}}),
        ("thinking_budget", 2000, 9000, {"thinking_budget": 2000, "enable_thinking": True}),
        ("thinking_budget", 2000, 100, {"thinking_budget": 99, "enable_thinking": True}),
        ("thinking_budget", 0, 9000, {"enable_thinking": False}),
    ],
)
async def test_a_limit_of_thoughts_is_sent_in_the_field_of_the_server(
    kind: Any, limit: int, max_tokens: int, fields: dict[str, Any]
) -> None:
    options = ChatOptions(("m",), thinking_limit=kind)
    plain = await limited(options, None, max_tokens)
    assert await limited(options, limit, max_tokens) == plain | fields
    assert not {"thinking", "reasoning", "thinking_budget", "enable_thinking"} & set(plain)


async def test_a_server_that_limits_thoughts_says_so_and_another_refuses() -> None:
    for kind in ("none", "reasoning"):
        hosted = Hosted(lambda _: stream(), ChatOptions(("m",), thinking_limit=kind))
        [info] = await hosted.engine.models()
        assert (info.tells_thoughts, info.limits_thoughts) == (True, kind == "reasoning")
        await hosted.engine.close()
    with pytest.raises(NotSupported, match="cannot limit thoughts, unless thinking_limit in its table"):
        await limited(ChatOptions(("m",)), 100)


@pytest.mark.parametrize("dialect", ["reasoner", "vllm"])
async def test_other_servers_refuse_the_limit_instead_of_ignoring_it(dialect: str) -> None:
    engine: EngineClient = HttpEngine("http://elsewhere", dialect=dialect)
    request = GenerateRequest("r", "m", (1, 2), (Branch(1, 1, 9),), thinking_limit=5)
    with pytest.raises(EngineError, match="thinking_limit is for servers that only chat"):
        async for _ in engine.generate(request):
            pass
    await engine.close()
