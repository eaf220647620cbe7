"""Thoughts of jobs on servers that only chat: parts of nodes, billed as such, limited by the server, not sent back."""

from __future__ import annotations

from typing import Any

import pytest

from api.conversation.narration import Narration
from api.openai.chat.answer import build_completion
from engine.protocol.types import InvalidRequest
from engine.remote.chat.options import ChatOptions
from reasoner.jobs.events import Event
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from tests.engine.remote.test_chat import Hosted, fresh, said, stream, usage
from tests.engine.remote.test_chat_thoughts import details, thinks
from tests.specs import build_spec

__all__ = ["fresh"]  # the fixture holds here, too

ANSWER = "The sum is \\boxed{7}."


def visible(body: dict[str, Any]) -> Any:
    return stream(thinks("Three and \\boxed{4}."), said(ANSWER, "stop"), usage(9, 50, **details(41)))


def hidden(body: dict[str, Any]) -> Any:
    return stream(said(ANSWER, "stop"), usage(9, 50, **details(41)))


def plain(body: dict[str, Any]) -> Any:
    return stream(said(ANSWER, "stop"), usage(9, 50))


def spec(name: str = "greedy", params: dict[str, Any] | None = None, **more: Any) -> JobSpec:
    strategy = {"name": name} | (params or {})
    common = {"problem": "3 + 4?", "model": "m", "verifier": None, "seed": 1, "strategy": strategy}
    return build_spec(common | more)


async def solve(hosted: Hosted, job: JobSpec) -> tuple[JobOutcome, MemoryJournal]:
    journal = MemoryJournal()
    try:
        return await run_job(job, hosted.engine, journal), journal
    finally:
        await hosted.engine.close()


def node_of(journal: MemoryJournal) -> dict[str, Any]:
    [data] = [entry.data for entry in journal.entries if entry.type == "node"]
    return data


def told(job: JobSpec, journal: MemoryJournal, outcome: JobOutcome) -> Any:
    """Return the message and the usage of the chat completion of a job, and its narration."""
    narration = Narration(job.model_dump())
    events = [Event(seq=seq, type=e.type, at=1.0, data=e.data) for seq, e in enumerate(journal.entries, 1)]
    data = {"result": outcome.result.model_dump(), "error": None, "usage": outcome.usage.model_dump()}
    for event in [*events, Event(seq=len(events) + 1, type=f"job.{outcome.status}", at=2.0, data=data)]:
        narration.add(event)
    assert narration.end is not None
    document: Any = {"id": "job_1", "created_at": 1.0, "status": outcome.status}
    document["spec"] = job.model_dump() | {"metadata": {}}
    completion = build_completion(document, narration, narration.end, None)
    return completion.choices[0].message, completion.usage, narration.text


# Parts.


async def test_a_thought_is_a_part_of_its_node_and_the_reasoning_content_of_our_own_api() -> None:
    hosted, job = Hosted(visible), spec()
    outcome, journal = await solve(hosted, job)
    data = node_of(journal)
    head = "<think>\nThree and \\boxed{4}.\n</think>\n\n"
    assert data["text"] == head + ANSWER
    assert data["parts"] == [["thought", "generated", len(head), 41], ["answer", "generated", len(ANSWER), 9]]
    assert data["thought"] == {"state": "closed", "tokens": 41}
    assert (outcome.result.answer, outcome.result.thought) == ("7", "Three and \\boxed{4}.")
    assert outcome.result.content == ANSWER
    assert (outcome.usage.generated, outcome.usage.thought) == (50, 41)
    assert len(hosted.bodies) == 1
    assert "stop" not in hosted.bodies[0]
    message, bill, _ = told(job, journal, outcome)
    assert (message.reasoning_content, message.content) == ("Three and \\boxed{4}.", ANSWER)
    assert bill.completion_tokens_details.reasoning_tokens == 41


async def test_hidden_reasoning_counts_as_thought_and_leaves_the_narration_as_reasoning_content() -> None:
    job = spec("self_consistency", {"n": 3})
    outcome, journal = await solve(Hosted(hidden), job)
    assert (outcome.usage.generated, outcome.usage.thought) == (150, 123)
    assert (outcome.result.text, outcome.result.thought, outcome.result.content) == (ANSWER, "", ANSWER)
    message, bill, narration = told(job, journal, outcome)
    assert message.reasoning_content == narration != ""
    assert bill.completion_tokens - bill.completion_tokens_details.reasoning_tokens == 9


async def test_a_model_that_does_not_think_has_answers_alone() -> None:
    job = spec()
    outcome, journal = await solve(Hosted(plain), job)
    assert node_of(journal)["parts"] == [["answer", "generated", len(ANSWER), 50]]
    assert (outcome.usage.thought, outcome.result.answer) == (0, "7")
    assert told(job, journal, outcome)[0].reasoning_content.startswith("Branch 0")


async def test_an_answer_within_a_thought_that_was_cut_is_none() -> None:
    hosted = Hosted(lambda _: stream(thinks("It is \\boxed{4}, I think,"), said("", "length"), usage(9, 64)))
    outcome, journal = await solve(hosted, spec(sampling={"max_tokens": 64}))
    assert (outcome.status, outcome.result.answer, outcome.result.content) == ("incomplete", None, "")
    assert node_of(journal)["thought"] == {"state": "open", "tokens": 64}


async def test_the_thought_of_a_server_that_goes_on_is_not_cut_into_requests_and_its_answer_is() -> None:
    """Both ends are beyond the length of a request, which ends at a multiple of 512 tokens."""

    def answer(body: dict[str, Any]) -> Any:
        if body["messages"][-1]["role"] == "user":
            thought = [thinks("Three and four."), said("The sum", "length")]
            return stream(*thought, usage(9, 900, **details(890)))
        return stream(said(" is \\boxed{7}.", "stop"), usage(9, 9))

    hosted = Hosted(answer, ChatOptions(("m",), prefill="continue_final_message"))
    outcome, _ = await solve(hosted, spec(budget={"tokens": 5000}))
    assert (outcome.result.content, outcome.usage.thought) == ("The sum is \\boxed{7}.", 890)
    assert hosted.bodies[0]["max_completion_tokens"] > 900
    assert hosted.bodies[1]["max_completion_tokens"] == 1024 - 900
    assert hosted.bodies[1]["messages"][-1] == {"role": "assistant", "content": "The sum"}


# Conversations.


@pytest.mark.parametrize("prefill", ["none", "continue_final_message"])
@pytest.mark.parametrize("is_inline", [False, True])
async def test_revise_sends_earlier_answers_without_their_thoughts(prefill: Any, is_inline: bool) -> None:
    def inline(_: dict[str, Any]) -> Any:
        return stream(said(f"<think>\nThree and four.\n</think>\n\n{ANSWER}", "stop"), usage(9, 50))

    hosted = Hosted(inline if is_inline else visible, ChatOptions(("m",), prefill=prefill))
    kwargs = {"reasoning_effort": "low"}
    job = spec("revise", {"n": 3, "chains": 1}, chat_template_kwargs=kwargs)
    outcome, _ = await solve(hosted, job)
    assert outcome.result.answer == "7"
    assert len(hosted.bodies) == 3
    for turns, body in enumerate(hosted.bodies):
        earlier = [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        assert earlier == [ANSWER] * turns
        fields = kwargs if prefill == "none" else {"chat_template_kwargs": kwargs}
        assert fields.items() <= body.items()


# Limits and refusals.


async def test_the_limit_of_a_thought_is_left_to_a_server_that_has_a_field_for_it() -> None:
    hosted = Hosted(visible, ChatOptions(("m",), thinking_limit="thinking_budget"))
    outcome, journal = await solve(
        hosted, spec("self_consistency", {"n": 2}, budget={"tokens": 500, "thinking_tokens": 30})
    )
    assert [body["thinking_budget"] for body in hosted.bodies] == [30, 30]
    assert all(body["max_completion_tokens"] <= 500 for body in hosted.bodies)
    # The server has not kept it: the search neither closes the thought nor asks again, and bills what it got.
    assert (outcome.usage.thought, len(hosted.bodies)) == (82, 2)
    nodes = [entry.data for entry in journal.entries if entry.type == "node"]
    assert all(origin == "generated" for data in nodes for _, origin, _, _ in data["parts"])


async def test_a_job_without_a_limit_sends_none() -> None:
    hosted = Hosted(visible, ChatOptions(("m",), thinking_limit="reasoning"))
    await solve(hosted, spec())
    assert "reasoning" not in hosted.bodies[0]


@pytest.mark.parametrize("prefill", ["none", "continue_final_message"])
async def test_a_limit_that_no_field_carries_is_refused_with_the_option_that_names_one(prefill: Any) -> None:
    hosted = Hosted(visible, ChatOptions(("m",), prefill=prefill))
    with pytest.raises(InvalidRequest, match=r"budget\.thinking_tokens: model 'm'.*'thinking_limit' in its table") as e:
        await solve(hosted, spec(budget={"tokens": 500, "thinking_tokens": 30}))
    assert (e.value.field, hosted.bodies) == ("budget.thinking_tokens", [])


async def test_delimiters_and_variables_without_a_field_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="thoughts: the server of model 'm' only chats"):
        await solve(Hosted(visible), spec(thoughts={"open": "<t>", "close": "</t>"}))
    with pytest.raises(InvalidRequest, match="no field for 'enable_thinking'"):
        await solve(Hosted(visible), spec(chat_template_kwargs={"enable_thinking": False}))
