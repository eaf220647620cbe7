"""Calls of the client's functions: solutions end with them and vote on them; unknown formats are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from engine.protocol.types import (
    Branch,
    InvalidRequest,
    ModelInfo,
    ScoreRequest,
    ScoreResult,
    TemplateKwargs,
    TokenizeRequest,
)
from reasoner.best_so_far import choose_best_so_far
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import JobOutcome, run_job
from reasoner.strategies.registry import STRATEGIES
from tests.reasoner.search.test_thoughts import nodes_of
from tests.scripted import EOS, TEXTS, ScriptedEngine
from tests.specs import build_spec
from tests.strategies import COMPARING, WRITING

FIRST, SECOND, THIRD, WORDS = 5, 6, 7, 8
HERMES = "{% if tools %}{{ tools | tojson }}<tool_call>{{ call.arguments }}</tool_call>{% endif %}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA}
CLOCK = {"type": "function", "name": "clock"}


def write(*calls: tuple[str, str]) -> str:
    return "".join(f'\n<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in calls)


PARIS = '{"city": "Paris", "days": 2}'
SAME = '{"days": 2.0,  "city":"Par\\u0069s"}'
ROME = '{"city": "Rome", "days": 2}'


class CallingEngine(ScriptedEngine):
    """Engine whose solutions are one of four texts, each drawn by its branch."""

    def __init__(self, *texts: str, template: str = HERMES) -> None:
        super().__init__()
        self._texts = texts
        self._template = template
        self.kwargs: list[TemplateKwargs] = []
        self.messages: list[Any] = []

    async def models(self) -> list[ModelInfo]:
        infos = await super().models()
        return [replace(info, chat_template=self._template, extra=info.extra | {"server": "vllm"}) for info in infos]

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        if not isinstance(request.text, str):
            self.kwargs.append(request.template_kwargs)
            self.messages.append(request.text)
            request = replace(request, text=[{"role": "user", "content": "how?"}])
        return await super().tokenize(request)

    def token(self, branch: Branch, position: int, temperature: float) -> int:
        drawn = FIRST + (branch.key % len(self._texts) if temperature else 0)
        return drawn if position == len("how?") else EOS


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Any:
    def plan(*given: str) -> CallingEngine:
        for token, text in enumerate(given, FIRST):
            monkeypatch.setitem(TEXTS, token, text)
        return CallingEngine(*given)

    return plan


def name_fields(strategy: str = "self_consistency", n: int | None = 24) -> dict[str, Any]:
    fields = {"problem": "how?", "seed": 3, "strategy": {"name": strategy} | ({"n": n} if n else {})}
    return fields | {"tools": [WEATHER, CLOCK], "verifier": None}


def make_spec(strategy: str = "self_consistency", n: int | None = 24, **more: Any) -> JobSpec:
    return build_spec(name_fields(strategy, n) | more)


async def solve(engine: CallingEngine, journal: MemoryJournal | None = None, **more: Any) -> JobOutcome:
    return await run_job(make_spec(**more), engine, journal or MemoryJournal())


def read_calls(outcome: JobOutcome) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in outcome.result.tool_calls]


async def test_the_most_frequent_calls_win_whatever_their_text(texts: Any) -> None:
    engine = texts(write(("weather", PARIS)), write(("weather", SAME)), write(("weather", ROME)))
    outcome = await solve(engine)
    assert read_calls(outcome) == [("weather", {"city": "Paris", "days": 2})]
    assert json.loads(outcome.result.answer or "") == [{"name": "weather", "arguments": json.loads(PARIS)}]
    assert len(outcome.result.votes) == 2
    exact = await solve(engine, tool_vote="exact")
    assert len(exact.result.votes) == 3
    by_name = await solve(engine, tool_vote="name")
    assert [vote.count for vote in by_name.result.votes] == [24]


async def test_the_order_of_parallel_calls_is_no_difference(texts: Any) -> None:
    one = write(("weather", PARIS), ("clock", "{}"))
    outcome = await solve(texts(one, write(("clock", "{}"), ("weather", SAME))))
    assert [vote.count for vote in outcome.result.votes] == [24]
    assert {name for name, _ in read_calls(outcome)} == {"weather", "clock"}


async def test_replies_in_words_vote_together_against_calls(texts: Any) -> None:
    engine = texts("It is sunny.", "The sun shines.", "Sunny, I think.", write(("weather", PARIS)))
    outcome = await solve(engine)
    assert outcome.result.tool_calls == []
    assert outcome.result.answer in ("It is sunny.", "The sun shines.", "Sunny, I think.")
    assert len(outcome.result.votes) == 2
    required = await solve(engine, tool_choice="required")
    assert [name for name, _ in read_calls(required)] == ["weather"]
    assert len(required.result.votes) == 1


async def test_a_number_in_a_reply_is_no_answer_that_is_stated(texts: Any) -> None:
    outcome = await solve(texts("It is 21 degrees.", "The sun shines.", "At 9 it was 19.", write(("weather", PARIS))))
    assert outcome.result.tool_calls == []
    assert len(outcome.result.votes) == 2
    assert outcome.result.abstained == 0
    alone = await solve(texts("It is 21 degrees."), n=2)
    assert (alone.result.answer, alone.result.answer_level) == ("It is 21 degrees.", "strict")


async def test_a_rule_confirms_a_number_in_a_reply(texts: Any) -> None:
    engine = texts("It is 21 degrees.", "The sun shines.", write(("weather", PARIS)))
    outcome = await solve(engine, strategy="best_of_n", verifier={"kind": "numeric", "expected": 21})
    assert (outcome.result.answer, outcome.result.confidence) == ("21", 1.0)


async def test_calls_in_a_thought_are_no_answer(texts: Any) -> None:
    thought = f"<think>Perhaps {write(('clock', 'none'))}</think>"
    outcome = await solve(texts(thought + write(("weather", PARIS))), n=4)
    assert [name for name, _ in read_calls(outcome)] == ["weather"]
    words = await solve(texts(f"<think>{write(('clock', '{}'))}</think>It is late."), n=4)
    assert words.result.tool_calls == []
    assert words.result.answer == "It is late."


async def test_channels_are_told_apart(texts: Any) -> None:
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = f"{analysis}<|channel|>final<|message|>It is \\boxed{{4}}.<|return|>"
    called = f"{analysis}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>"
    outcome = await solve(texts(called), tool_format="harmony", n=2)
    assert read_calls(outcome) == [("weather", json.loads(PARIS))]
    assert (await solve(texts(final), tool_format="harmony", n=2)).result.answer == "4"
    words = await solve(texts(final.replace("\\boxed{4}", "late")), tool_format="harmony", n=2)
    assert words.result.answer == words.result.content == "It is late."


async def test_stated_answers_still_vote_by_their_value(texts: Any) -> None:
    outcome = await solve(texts("It is \\boxed{2}.", "So \\boxed{2.0}", "Perhaps \\boxed{3}"))
    assert outcome.result.answer in ("2", "2.0")
    assert len(outcome.result.votes) == 2


@pytest.mark.parametrize(
    ("text", "fields", "fault"),
    [
        (write(("weather", '{"city": ')), {}, "JSON"),
        (write(("wether", "{}")), {}, "weather"),
        (write(("weather", '{"days": "two"}')), {"tools": [WEATHER | {"strict": True}]}, "not valid under its schema"),
        (write(("clock", "{}")), {"tool_choice": {"name": "weather"}}, "does not call 'weather' alone"),
        (write(("clock", "{}"), ("weather", PARIS)), {"parallel_tool_calls": False}, "makes 2 calls"),
        ("In words.", {"tool_choice": "required"}, "calls no function"),
    ],
)
async def test_a_faulty_call_is_no_answer_and_says_why(
    texts: Any, text: str, fields: dict[str, Any], fault: str
) -> None:
    journal = MemoryJournal()
    outcome = await solve(texts(text), journal, n=4, **fields)
    assert outcome.result.answer is None
    assert outcome.status == "incomplete"
    assert all(fault in entries[-1].data["call_fault"] for entries in nodes_of(journal).values())


@pytest.mark.parametrize("strategy", WRITING)
async def test_every_strategy_answers_with_calls_and_its_replay_too(texts: Any, strategy: str) -> None:
    more = {} if STRATEGIES[strategy].needs_verifier or strategy in COMPARING else {"verifier": None}
    fields = name_fields(strategy, None)
    fields.pop("verifier")
    spec = build_spec(fields | more | {"budget": {"tokens": 3000}})
    engine, journal = texts(write(("weather", PARIS)), write(("weather", ROME))), MemoryJournal()
    outcome = await run_job(spec, engine, journal)
    assert [name for name, _ in read_calls(outcome)] == ["weather"]
    assert (await run_job(spec, engine, MemoryJournal(journal.entries))).result == outcome.result
    best = choose_best_so_far(spec, journal.entries)
    assert best is not None
    assert [call.name for call in best.tool_calls] == ["weather"]


async def test_the_template_gets_functions_calls_and_results(texts: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    messages = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    engine = texts("It is sunny.")
    fields = name_fields(n=2) | {"messages": messages}
    fields.pop("problem")
    spec = build_spec(fields)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    outcome = await run_job(spec, engine, MemoryJournal())
    assert outcome.result.text == "It is sunny."
    [kwargs], [rendered] = engine.kwargs, engine.messages
    assert kwargs["tools"][0]["function"] == {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == json.loads(PARIS)
    assert rendered[2] == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
    await run_job(spec.model_copy(update={"tool_choice": "none"}), engine, MemoryJournal())
    assert engine.kwargs[1] == {}


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        ("", {}, "which is not known here: give 'tool_format', one of harmony"),
        ("{{ messages }}", {}, "which has none that is known"),
        (HERMES, {"tool_format": "hermse"}, "no format 'hermse'; known are"),
    ],
)
async def test_without_a_known_format_no_token_is_spent(
    texts: Any, template: str, fields: dict[str, Any], message: str
) -> None:
    engine = texts("words")
    engine._template = template
    with pytest.raises(InvalidRequest, match=message):
        await solve(engine, **fields)
    assert engine.generated == []
    engine._template = ""
    assert (await solve(engine, tool_format="hermes", n=1)).result.answer == "words"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [WEATHER, WEATHER]}, "listed twice"),
        ({"tools": [{"type": "function", "name": "no spaces"}]}, "pattern"),
        ({"tools": [{"type": "search"}]}, "known are python and function"),
        ({"tools": [CLOCK | {"parameters": {"type": "string"}}]}, "are an object"),
        ({"tools": [], "tool_choice": "required"}, "no function to call"),
        ({"tool_choice": {"name": "wether"}}, "no function 'wether'; there are weather, clock"),
    ],
)
def test_tools_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_spec(**fields)


CALL = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "tool", "tool_call_id": "c1", "content": "x"}], "no call before it has the id 'c1'"),
        ([{"role": "assistant", "tool_calls": [CALL]}], "the call 'c1' has no result"),
        (
            [{"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": "x"}],
            "the call 'c1' has no result",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "role 'user' calls nothing"),
        ([{"role": "tool", "content": "x"}], "has one, and no other"),
        ([{"role": "assistant"}], "it is empty"),
    ],
)
def test_conversations_whose_calls_and_results_do_not_match_are_refused(
    messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        build_spec({"messages": [{"role": "user", "content": "?"}, *messages]})


class TurnGrader(CallingEngine):
    """Engine that grades turns: those with its second text are right."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.graded: list[tuple[object, ...]] = []

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        results = []
        for item, result in zip(request.items, await super().score(request), strict=True):
            [part] = item.parts
            assert not isinstance(part, str)
            self.graded.append(part)
            worst, *_, best = request.token_ids
            wanted = best if SECOND in part else worst
            row = tuple(math.log(0.9) if token == wanted else -30.0 for token in request.token_ids)
            results.append(result if result.values is None else replace(result, values=(row,)))
        return results


async def test_turns_with_calls_are_ranked_by_grades_behind_the_conversation(texts: Any) -> None:
    texts(write(("weather", PARIS)), write(("weather", ROME)), "It is sunny.")
    engine = TurnGrader(write(("weather", PARIS)), write(("weather", ROME)), "It is sunny.")
    outcome = await solve(engine, strategy="best_of_n", n=12, verifier={"kind": "graded"})
    assert read_calls(outcome) == [("weather", json.loads(ROME))]
    assert outcome.result.confidence == pytest.approx(1.0)
    asked = await engine.tokenize(TokenizeRequest("policy", "Grade this turn, its calls included", special=False))
    assert {part[:4] for part in engine.graded} == {engine.requests[0].prompt}
    assert all(asked == part[7 : 7 + len(asked)] for part in engine.graded)


@pytest.mark.parametrize("other", ["It is sunny.", write(("weather", PARIS))])
async def test_a_reply_with_a_number_is_chosen_by_its_grade(texts: Any, other: str) -> None:
    texts(other, "It is 21 degrees.")
    outcome = await solve(
        TurnGrader(other, "It is 21 degrees."), strategy="best_of_n", n=8, verifier={"kind": "graded"}
    )
    assert outcome.result.content == "It is 21 degrees."
    assert outcome.result.confidence == pytest.approx(1.0)
