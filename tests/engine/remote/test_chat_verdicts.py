"""Verdicts of judges on chat servers: what is one, what is none, and the room that a thinking judge needs."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from engine.protocol.types import (
    EngineUnavailable,
    InvalidRequest,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TokenizeRequest,
)
from engine.remote.chat import judge as chat_judge
from engine.remote.chat.options import ChatOptions
from engine.remote.chat.verdict import find_verdict
from prm.scorers.grades import GradeReader, Scale, write_question
from prm.scorers.verdict_formats import SCALES
from tests.engine.remote.test_chat import MESSAGES, Hosted, fresh

__all__ = ["fresh"]  # the fixture holds here, too

RIGHT = [
    *(
        "Yes",
        "yes",
        "YES.",
        "**Yes**",
        "_Yes_",
        "`Yes`",
        "'yes'",
        '"Yes"',
        "\u201cYes\u201d",
        "(Yes)",
        "> Yes",
        "# Yes",
    ),
    *("Answer: Yes", "Verdict: yes", "**Verdict:** Yes", "**Answer:**\n\n**Yes**", "The answer is **yes**.", "Yes!"),
    *(
        "\\boxed{Yes}",
        "$\\boxed{\\text{Yes}}$",
        "\\textbf{Yes}",
        "```\nYes\n```",
        "<verdict>Yes</verdict>",
        "<b>Yes</b>",
    ),
    *('{"verdict": "Yes"}', '{"answer": "yes", "reason": "No error was found."}', '{"correct": true}', "true"),
    *('```json\n{"verdict": "Yes"}\n```', '{"Verdict": {"value": "YES"}}', '["Yes"]'),
    *("Yes, because it is right.", "Yes - every step holds", "Yes.\n\nNo step is wrong.", "Yes it is.", "It is a yes."),
    *("<think>No?</think>Yes", "[THINK]no[/THINK]**Yes**", "All steps are right. So yes.", "Each holds.\n\n**Yes**"),
    *(
        "\u7b54\u6848\uff1aYes",
        "\uff39\uff45\uff53",
        "Correct? Yes",
        "Is every step right? Yes.",
        "Yes, there is no error",
    ),
]
WRONG = [
    *("No", "no", "NO!", "**No**", "No.", "No - the second step is wrong", "No, the second step is wrong."),
    *(
        "Answer: No",
        "Verdict: no",
        "\\boxed{No}",
        "<think>Yes?</think>\nNo",
        "The answer is no",
        "No because 3 + 4 = 7",
    ),
    *(
        '{"verdict": false}',
        '{"is_correct": false, "explanation": "Yes would be wrong"}',
        "Therefore, no.",
        "No, wait, no.",
    ),
]
NEITHER = [
    *("", "  \n", "Perhaps", "I cannot help with that.", "I'm sorry, but I can't assist.", "Yes and no.", "Yes or No?"),
    *(
        "Answer with Yes or No.",
        "Yes/No",
        "Answer: Yes or No",
        "<think>Yes",
        "<think>Yes</think>",
        "No errors were found.",
    ),
    *("No doubt it is right.", "Maybe yes, maybe no.", "Yes. No.", "**Yes**\n\n**No**", "Verdict: Yes\nVerdict: No"),
    *("I cannot say yes.", "I can't say yes or no", "The answer is not Yes", "Answer: not yes", "If it is 7, then yes"),
    *("42", "0.5", "{}", '{"a": 1}', "[]", "null", "Yesterday", "Note that", "Know", "No comment", "N/A", "Is it yes?"),
]


@pytest.mark.parametrize(
    ("text", "index"),
    [*((text, 0) for text in RIGHT), *((text, 1) for text in WRONG), *((text, None) for text in NEITHER)],
)
def test_a_verdict_is_read_in_any_case_and_markup_and_never_guessed(text: str, index: int | None) -> None:
    found = find_verdict(text, ["Yes", "No"])
    assert (None if found is None else found.index) == index


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        *(("C", "C"), ("c.", "C"), ("**Grade: T**", "T"), ("Grade: B\n\nA step is missing.", "B"), ("\\boxed{F}", "F")),
        *(("Score: Q", "Q"), ('{"grade": "D"}', "D"), ("I grade it.", None), ("", None), ("Grade: B or C", None)),
    ],
)
async def test_a_written_grade_counts_where_no_log_probabilities_are_listed(text: str, grade: str | None) -> None:
    hosted = Hosted(lambda _: answer(text))
    [info, *_] = await hosted.engine.models()
    scale = Scale(SCALES["A-T"])
    reader = await GradeReader.open(hosted.engine, info, scale)
    assert reader.lead == ()
    prompt = await hosted.engine.tokenize(TokenizeRequest("m", MESSAGES))
    question = write_question(scale, 0, None, "solution")
    [reading] = await reader.read([ScoreItem((prompt,), (0,))], [question])
    assert reading.scores == (() if grade is None else pytest.approx((scale.scores[grade],)))
    assert (reading.unread is None) == (grade is not None)
    await hosted.engine.close()


def answer(
    text: str | None,
    tokens: list[tuple[str, dict[str, float]]] | None = None,
    completion: int = 1,
    reasoning: int = 0,
    finish: str = "stop",
    **message: Any,
) -> httpx.Response:
    choice: dict[str, Any] = {"message": {"content": text} | message, "finish_reason": finish}
    if tokens is not None:
        listed = [
            {"token": token, "logprob": 0.0, "top_logprobs": [{"token": t, "logprob": p} for t, p in top.items()]}
            for token, top in tokens
        ]
        choice["logprobs"] = {"content": listed}
    usage = {"prompt_tokens": 30, "completion_tokens": completion}
    usage |= {"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}
    return httpx.Response(200, json={"choices": [choice], "usage": usage})


async def judge(hosted: Hosted, max_compute: int | None = None) -> ScoreResult:
    verdicts = [(await hosted.engine.tokenize(TokenizeRequest("m", word, special=False)))[0] for word in ("Yes", "No")]
    prompt = await hosted.engine.tokenize(TokenizeRequest("m", MESSAGES))
    request = ScoreRequest("s", "m", (ScoreItem((prompt,), (0,)),), tuple(verdicts), max_compute)
    [result] = await hosted.engine.score(request)
    return result


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_judge, "_THINKERS", set())


@pytest.mark.parametrize("text", ["**Yes**", "yes", "Answer: Yes", "<think>hm</think>Yes"])
async def test_a_judge_without_log_probabilities_is_certain_of_what_it_writes(text: str) -> None:
    hosted = Hosted(lambda _: answer(text))
    result = await judge(hosted)
    assert result.values == ((0.0, chat_judge._UNLIKELY),)
    assert result.unread is None
    await hosted.engine.close()


@pytest.mark.parametrize("text", ["", None, "I cannot help with that.", "Yes and no."])
async def test_what_is_no_verdict_is_kept_and_billed_and_has_no_values(text: str | None) -> None:
    hosted = Hosted(lambda _: answer(text, completion=5))
    result = await judge(hosted)
    assert (result.values, result.unread, result.computed_tokens) == ((), text or "", 35)
    assert len(hosted.bodies) == 1
    await hosted.engine.close()


async def test_a_refusal_in_a_field_of_its_own_is_no_verdict() -> None:
    hosted = Hosted(lambda _: answer(None, refusal="I can't judge this."))
    result = await judge(hosted)
    assert (result.values, result.unread) == ((), "I can't judge this.")
    await hosted.engine.close()


async def test_a_verdict_in_parts_of_content_is_read() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "No?"}]}, {"type": "text", "text": "**Yes**"}]
    hosted = Hosted(lambda _: answer(parts))  # type: ignore[arg-type]
    assert (await judge(hosted)).values == ((0.0, chat_judge._UNLIKELY),)
    await hosted.engine.close()


async def test_log_probabilities_are_read_where_the_verdict_stands_of_all_its_spellings() -> None:
    top = {"Yes": math.log(0.3), " yes": math.log(0.2), "**Yes": math.log(0.1), "No": math.log(0.25), "Hm": -9.0}
    tokens = [("<think>", {"<think>": 0.0}), ("No", {"No": 0.0}), ("</think>", {}), ("Yes", top)]
    hosted = Hosted(lambda _: answer("<think>No</think>Yes", tokens))
    result = await judge(hosted)
    assert result.values is not None
    assert result.values[0] == pytest.approx((math.log(0.6), math.log(0.25)))
    await hosted.engine.close()


async def test_a_text_without_a_verdict_counts_by_its_first_token_if_that_is_likely_to_be_one() -> None:
    top = {"Let": -1.0, "Yes": -2.0, "No": -1.5}
    hosted = Hosted(lambda _: answer("Let me see", [("Let", top), (" me", {})]))
    result = await judge(hosted)
    assert result.values is not None
    assert result.values[0] == pytest.approx((-2.0, -1.5))
    hosted = Hosted(lambda _: answer("I cannot judge", [("I", {"I": -0.01, "Yes": -7.0, "No": -8.0})]))
    assert (await judge(hosted)).values == ()
    await hosted.engine.close()


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("hidden", [True, False])
async def test_a_judge_that_thinks_gets_room_once_it_was_seen_to(lists: bool, hidden: bool) -> None:
    def respond(body: dict[str, Any]) -> httpx.Response:
        if not lists and "logprobs" in body:
            return httpx.Response(400, json={"error": {"message": "no logprobs here", "param": "logprobs"}})
        limit = body["max_completion_tokens"]
        thought = {} if hidden else {"reasoning_content": "Step by step: " + "x" * limit}
        if limit < 1000:
            return answer("", completion=limit, reasoning=limit, finish="length", **thought)
        top = [("No", {"No": math.log(0.9), "Yes": math.log(0.1)})] if lists else None
        return answer("No", top, completion=700, reasoning=690, **thought)

    hosted = Hosted(respond)
    for asked in range(2):
        result = await judge(hosted)
        assert result.values is not None
        yes, no = result.values[0]
        assert (yes, no) == (pytest.approx((math.log(0.1), math.log(0.9))) if lists else (-30.0, 0.0))
        assert result.computed_tokens >= (30 + 700 if asked else 60 + 716)
    limits = [body["max_completion_tokens"] for body in hosted.bodies if lists or "logprobs" not in body]
    assert limits == [16, 4096, 4096]
    await hosted.engine.close()


async def test_the_room_of_a_verdict_is_the_configured_one() -> None:
    hosted = Hosted(lambda _: answer("Yes"), ChatOptions(("m",), verdict_tokens=300))
    await judge(hosted)
    assert hosted.bodies[0]["max_completion_tokens"] == 300
    await hosted.engine.close()


async def test_room_for_a_thought_that_the_budget_does_not_reach_is_asked_for_and_what_was_spent_is_billed() -> None:
    def respond(body: dict[str, Any]) -> httpx.Response:
        is_cut = body["max_completion_tokens"] < 1000
        return answer("" if is_cut else "Yes", completion=16, reasoning=10, finish="length" if is_cut else "stop")

    hosted = Hosted(respond)
    first = await judge(hosted, max_compute=200)
    assert first.values is None
    assert first.computed_tokens > 4096
    second = await judge(hosted, max_compute=first.computed_tokens)
    assert (second.values, second.computed_tokens) == (((0.0, -30.0),), 2 * 46)
    await hosted.engine.close()


async def test_fields_that_the_server_refuses_are_left_out_of_a_judges_request() -> None:
    def respond(body: dict[str, Any]) -> httpx.Response:
        if "temperature" in body:
            error = {"message": "Unsupported value: 'temperature' does not support 0.0", "param": "temperature"}
            return httpx.Response(400, json={"error": error})
        return answer("Yes")

    hosted = Hosted(respond, ChatOptions(("m",), omit=frozenset({"logprobs", "top_logprobs"})))
    assert (await judge(hosted)).values == ((0.0, -30.0),)
    assert "logprobs" not in hosted.bodies[0]
    await hosted.engine.close()


async def test_one_refused_conversation_has_no_verdict_and_the_others_have_theirs() -> None:
    def respond(body: dict[str, Any]) -> httpx.Response:
        if "bad" in body["messages"][-1]["content"]:
            return httpx.Response(400, json={"error": {"message": "flagged by the content filter"}})
        return answer("Yes")

    hosted = Hosted(respond)
    verdicts = [(await hosted.engine.tokenize(TokenizeRequest("m", word, special=False)))[0] for word in ("Yes", "No")]
    items = tuple(
        [
            ScoreItem((await hosted.engine.tokenize(TokenizeRequest("m", [{"role": "user", "content": text}])),), (0,))
            for text in ("a", "bad")
        ]
    )
    good, bad = await hosted.engine.score(ScoreRequest("s", "m", items, tuple(verdicts)))
    assert good.values == ((0.0, -30.0),)
    assert (bad.values, bad.unread) == ((), "flagged by the content filter")
    await hosted.engine.close()


async def test_a_model_that_is_not_there_is_an_error_of_all() -> None:
    error = {"message": "The model 'm' does not exist", "code": "model_not_found", "param": "model"}
    hosted = Hosted(lambda _: httpx.Response(404, json={"error": error}))
    with pytest.raises(InvalidRequest, match="does not exist"):
        await judge(hosted)
    await hosted.engine.close()


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, content=b"<html>", headers={"content-type": "text/html"}),
        httpx.Response(200, json={"object": "list"}),
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, json={"choices": [{"message": {"content": 7}}]}),
        httpx.Response(200, json={"choices": [{"message": "Yes"}]}),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"error": {"message": "upstream", "code": 502}}),
        httpx.Response(200, content=b'{"choices": [{"mess', headers={"content-type": "application/json"}),
    ],
)
async def test_an_answer_of_another_form_is_a_passing_failure(response: httpx.Response) -> None:
    hosted = Hosted(lambda _: httpx.Response(200, content=response.content, headers=response.headers))
    with pytest.raises(EngineUnavailable, match=r"not an OpenAI completion|is not JSON: content-type|upstream"):
        await judge(hosted)
    assert len(hosted.bodies) == 4
    await hosted.engine.close()
