"""Python that models call in their own format: state, bill, replay, thoughts, faults and client functions."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.types import Branch, EngineUnavailable, InvalidRequest, ModelInfo, TokenizeRequest
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.tool_specs import PYTHON_INSTRUCTION
from reasoner.run import JobOutcome, run_job
from reasoner.search.policies.call_format import resolve_python
from reasoner.search.replay import BILLED_ONLY
from reasoner.tree import find_turn, read_parts
from tests.long import mostly_long
from tests.reasoner.search.test_calls import (
    CALL,
    SAME_PATCHES,
    SEEDS,
    CallingEngine,
    Sandbox,
    check,
    make_spec,
    sandbox,
    solve,
)
from tests.reasoner.search.test_thoughts import check_parts, nodes_of
from tests.scripted import EOS, OPENING, TEXTS
from tests.strategies import WRITING

__all__ = ["sandbox"]

HERMES = "{{ tools }}<tool_call>{{ call.arguments }}</tool_call>"
LLAMA = '{{ tools }} {"name": function name, "parameters": dictionary of argument name and its value}'
COUNT = {"code": "n = globals().get('n', 0) + 1"}
TURN_END, TOOL, TOOL_END, ASSISTANT = 100, 101, 102, 103
CLOCK = {"type": "function", "name": "clock"}


def write(arguments: object = COUNT, name: str = "python", *, key: str = "arguments") -> str:
    call = json.dumps({"name": name, key: arguments})
    return f"\n<tool_call>\n{call}\n</tool_call>" if key == "arguments" else f"\n{call}"


class OwnCaller(CallingEngine):
    """Engine whose solutions call Python now and then in the format of a chat template.

    Calls without a closing delimiter end the model's turn.
    """

    def __init__(self, template: str = HERMES, **more: Any) -> None:
        super().__init__(**more)
        self.template = template
        self.kwargs: list[Any] = []
        self.asked: list[Any] = []

    async def models(self) -> list[ModelInfo]:
        infos = await super().models()
        return [replace(info, chat_template=self.template, extra=info.extra | {"server": "vllm"}) for info in infos]

    async def tokenize(self, request: TokenizeRequest) -> tuple[int, ...]:
        text = request.text
        if isinstance(text, str):
            return await super().tokenize(request)
        self.kwargs.append(request.template_kwargs)
        self.asked.append(text)
        tokens: tuple[int, ...] = ()
        for message in text:
            words = message["content"]
            if message.get("tool_calls"):
                [call] = message["tool_calls"]
                words = f'{call["function"]["arguments"]["code"]}"}}}}\n</tool_call>'
            own = await super().tokenize(replace(request, text=words))
            tokens += {"tool": (TOOL, *own, TOOL_END), "assistant": (*own, TURN_END)}.get(message["role"], own)
        is_later = text[-1]["role"] == "tool"
        begin = (ASSISTANT,) * is_later + (OPENING,) * self._thinks
        return tokens + begin * request.generation_prompt

    def token(self, branch: Branch, position: int, temperature: float) -> int:
        is_after_call = super().token(branch, position - 1, temperature) == CALL
        return EOS if self.template == LLAMA and is_after_call else super().token(branch, position, temperature)


def make_own_spec(strategy: str, seed: int, tool: dict[str, Any] | None = None, **more: Any) -> JobSpec:
    return make_spec(strategy, seed, {"instruction": PYTHON_INSTRUCTION} | (tool or {}), **more)


def plan(monkeypatch: pytest.MonkeyPatch, template: str, **more: Any) -> OwnCaller:
    monkeypatch.setitem(TEXTS, CALL, write(key="parameters" if template == LLAMA else "arguments"))
    return OwnCaller(template, **more)


def list_outputs(journal: MemoryJournal) -> list[str]:
    return [entry.data["text"] for entry in journal.entries if "call_ended" in entry.data]


@pytest.mark.parametrize("strategy", mostly_long(WRITING, every=4))
@given(seed=SEEDS, template=st.sampled_from([HERMES, LLAMA]))
@settings(SAME_PATCHES, max_examples=10)
async def test_every_strategy_goes_on_in_a_new_turn_and_branches_share_no_state(
    sandbox: Sandbox, strategy: str, seed: int, template: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        engine, journal = plan(patch, template, order=seed), MemoryJournal()
        outcome = await solve(make_own_spec(strategy, seed), journal, engine)
    check(journal, outcome, engine)
    for entry in journal.entries:
        if "call_ended" in entry.data and entry.data["text"]:
            tokens = entry.data["token_ids"]
            assert tokens[-1] == ASSISTANT
            assert [token for token in tokens if token >= TURN_END] in (
                [TURN_END, TOOL, TOOL_END, ASSISTANT],
                [TOOL, TOOL_END, ASSISTANT],
            )


@pytest.mark.parametrize("template", [HERMES, LLAMA])
async def test_own_calls_are_frequent_enough_to_be_tested(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    outcome = await solve(make_own_spec("self_consistency", 1, n=64), engine=plan(monkeypatch, template))
    assert outcome.usage.tool_calls > 20
    assert max(map(len, sandbox.calls)) >= 2
    assert {code for cells in sandbox.calls for code in cells} == {COUNT["code"]}


@pytest.mark.parametrize("strategy", mostly_long(["best_of_n", "beam", "mcts", "self_consistency"], every=3))
@given(seed=SEEDS, die_after=st.integers(1, 60), template=st.sampled_from([HERMES, LLAMA]))
@settings(SAME_PATCHES, max_examples=10)
async def test_a_replay_gives_the_same_result_and_runs_no_own_call_twice(
    sandbox: Sandbox, strategy: str, seed: int, die_after: int, template: str
) -> None:
    spec = make_own_spec(strategy, seed, deterministic=True)
    with pytest.MonkeyPatch.context() as patch:
        sandbox.calls.clear()
        expected = await solve(spec, engine=plan(patch, template))
        ran = len(sandbox.calls)
        journal = MemoryJournal()
        with contextlib.suppress(EngineUnavailable):
            await solve(spec, journal, plan(patch, template, die_after=die_after))
        journaled = sum("call_ended" in entry.data for entry in journal.entries)
        lost = sum(entry.type == BILLED_ONLY for entry in journal.entries)
        sandbox.calls.clear()
        again = await solve(spec, journal, plan(patch, template))
    assert again.result == expected.result
    if not lost:
        assert len(sandbox.calls) == ran - journaled


@pytest.mark.parametrize("limit", [None, 0, 9])
@pytest.mark.parametrize("strategy", ["self_consistency", "beam", "greedy"])
@given(seed=SEEDS)
@settings(SAME_PATCHES, max_examples=10)
async def test_each_turn_may_think_and_the_limit_holds_over_all_of_them(
    sandbox: Sandbox, strategy: str, limit: int | None, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        engine, journal = plan(patch, HERMES, thinks=True, order=seed), MemoryJournal()
        more = {} if limit is None else {"budget": {"tokens": 4000, "thinking_tokens": limit}}
        outcome = await solve(make_own_spec(strategy, seed, **more), journal, engine)
    check_parts(journal, outcome, limit)
    for entries in nodes_of(journal).values():
        parts = read_parts(entries[-1].data)
        start = find_turn(parts)
        if start and len(parts) > start:
            kinds = [part.kind for part in parts[start:]]
            assert kinds[0] == "thought"
            assert kinds == sorted(kinds, reverse=True)  # the thought of a turn comes first


async def test_an_answer_is_read_from_the_last_turn_alone(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    script = {0: "\\boxed{1}", 1: write(), 2: "So it is", 3: " \\boxed{2}.", 4: ""}
    outcome, journal = await follow(monkeypatch, script, answer="math")
    assert outcome.result.answer == "2"
    assert outcome.result.content == "So it is \\boxed{2}."
    assert list_outputs(journal) == ["\n```output\ncall 1\n```\n"]


async def test_channels_are_told_apart_and_bare_code_runs(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = "<|channel|>analysis<|message|>Is it \\boxed{1}?<|end|><|start|>assistant"
    call = f"{analysis}<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    script = {0: call, 1: f"{analysis}<|channel|>final<|message|>It is \\boxed{{2}}.<|return|>", 2: ""}
    outcome, journal = await follow(monkeypatch, script, template="<|channel|>{{ tools }}<|message|>", answer="math")
    assert sandbox.calls == [["1 + 1"]]
    assert outcome.result.answer == "2"
    assert outcome.result.content == "It is \\boxed{2}."
    assert list_outputs(journal) == ["\n```output\ncall 1\n```\n"]


async def follow(
    monkeypatch: pytest.MonkeyPatch, script: dict[int, str], **more: Any
) -> tuple[JobOutcome, MemoryJournal]:
    """Solve with one sample whose turns consist of these texts, one generated token each; an empty one ends a turn."""

    class Scripted(OwnCaller):
        count = 0

        def token(self, branch: Branch, position: int, temperature: float) -> int:
            text = script[self.count]
            self.count += 1
            return EOS if not text else 10 + self.count - 1

    for index, text in script.items():
        monkeypatch.setitem(TEXTS, 10 + index, text)
    engine, journal = Scripted(more.pop("template", HERMES)), MemoryJournal()
    tools = [{"type": "python"}, *more.pop("functions", ())]
    spec = make_own_spec("self_consistency", 3, n=1, **({"tools": tools} | more))
    outcome = await run_job(spec, engine, journal)
    assert engine.count == len(script)
    return outcome, journal


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (write(name="pyhton"), "there is no function 'pyhton'; the functions are python"),
        (write({"script": "1"}), "'python' takes one argument, 'code', which is a text"),
        (write({"code": 5}), "'python' takes one argument, 'code', which is a text"),
        ('\n<tool_call>\n{"name": "python", "arguments": {"code": "a\n"}}\n</tool_call>', "the arguments are not JSON"),
        ("\n<tool_call>\nprint(1)\n</tool_call>", "'{' was expected"),
    ],
)
async def test_a_faulty_call_runs_nothing_and_its_output_says_why(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, call: str, fault: str
) -> None:
    script = {0: write(), 1: call, 2: write(), 3: "done", 4: ""}
    outcome, journal = await follow(monkeypatch, script)
    first, faulty, last = list_outputs(journal)
    assert (first, last) == ("\n```output\ncall 1\n```\n", "\n```output\ncall 2\n```\n")
    assert f"```output\nerror: {fault}" in faulty
    assert [len(cells) for cells in sandbox.calls] == [1, 2]
    assert outcome.usage.tool_calls == 3
    assert outcome.result.content == "done"


async def test_calls_of_the_clients_functions_end_a_solution_after_python(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {0: write(), 1: "It is time.", 2: write({}, "clock"), 3: write({}, "clock"), 4: ""}
    outcome, _ = await follow(monkeypatch, script, functions=[CLOCK])
    assert [call.name for call in outcome.result.tool_calls] == ["clock", "clock"]
    assert outcome.result.content == "It is time."
    assert outcome.usage.tool_calls == 1


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (write(name="cloak"), "there is no function 'cloak'; the functions are python, clock"),
        (write({}, "clock") + write(), "one message calls 'python' once, and nothing else"),
    ],
)
async def test_a_call_that_fits_neither_python_nor_the_functions_is_explained(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, call: str, fault: str
) -> None:
    outcome, journal = await follow(monkeypatch, {0: call, 1: "words", 2: ""}, functions=[CLOCK])
    assert sandbox.calls == []
    assert fault in list_outputs(journal)[0]
    assert outcome.result.content == "words"


async def test_one_own_call_more_than_allowed_ends_the_solution(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for template in (HERMES, LLAMA):
        sandbox.calls.clear()
        journal = MemoryJournal()
        await solve(make_own_spec("self_consistency", 1, {"calls": 1}, n=64), journal, plan(monkeypatch, template))
        assert {len(cells) for cells in sandbox.calls} == {1}
        ended = [entries[-1].data for entries in nodes_of(journal).values() if entries[-1].data["reason"] == "tool"]
        assert ended
        assert all(end["text"].endswith(TEXTS[CALL]) for end in ended)


async def test_the_template_declares_python_unless_an_instruction_does(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = plan(monkeypatch, HERMES)
    await solve(make_own_spec("greedy", 1), engine=engine)
    [declared] = engine.kwargs[-1]["tools"]
    assert declared["function"]["name"] == "python"
    assert declared["function"]["parameters"]["required"] == ["code"]
    assert {message["role"] for messages in engine.asked for message in messages} == {"user", "assistant", "tool"}
    for tool in ({"instruction": "Use Python."}, {"call_format": "blocks"}):
        engine = plan(monkeypatch, HERMES)
        await solve(make_own_spec("greedy", 1, tool), engine=engine)
        assert engine.kwargs[-1] == {}
        assert "system" in {messages[0]["role"] for messages in engine.asked}


async def test_own_calls_do_not_run_where_a_job_wants_blocks_alone(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_own_spec("self_consistency", 1, {"call_format": "blocks"}, n=64)
    assert (await solve(spec, engine=plan(monkeypatch, HERMES))).usage.tool_calls == 0


async def test_blocks_also_run_where_the_model_has_a_format(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    block = "\n```python\nprint(1)\n```"
    _, journal = await follow(monkeypatch, {0: block, 1: "so", 2: write(), 3: "done", 4: ""})
    assert [len(cells) for cells in sandbox.calls] == [1, 2]
    assert sandbox.calls[1] == ["print(1)", COUNT["code"]]
    [entries] = nodes_of(journal).values()
    parts = read_parts(entries[-1].data)
    assert [part.origin for part in parts] == ["generated", "tool", "generated", "tool", "injected", "generated"]


def make_model(**fields: Any) -> ModelInfo:
    return ModelInfo("m", "generate", 99, 99, 1, **fields)


@pytest.mark.parametrize(
    ("models", "fields", "chosen"),
    [
        ([make_model(chat_template=HERMES)], {}, "hermes"),
        ([make_model(chat_template="{{ messages }}")], {}, "blocks"),
        ([make_model()], {"tool_format": "mistral"}, "mistral"),
        ([make_model(chat_template=HERMES, extra={"server": "chat"})], {}, "blocks"),
        ([make_model()], {"tool_format": "harmony"}, "blocks"),
        ([make_model(extra={"server": "vllm"})], {"tool_format": "harmony"}, "harmony"),
        ([make_model(chat_template=HERMES), make_model(chat_template=LLAMA)], {}, "blocks"),
        ([make_model(chat_template=HERMES), make_model(chat_template=HERMES)], {}, "hermes"),
    ],
)
def test_the_format_is_that_of_the_template_where_its_calls_can_run(
    models: list[ModelInfo], fields: dict[str, Any], chosen: str
) -> None:
    spec = resolve_python(make_own_spec("greedy", 1, **fields), models)
    assert spec.python is not None
    assert spec.python.call_format == chosen
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(("server", "message"), [({"server": "chat"}, "only chats"), ({}, "leaves the delimiters")])
def test_a_named_format_that_cannot_run_is_refused(server: dict[str, object], message: str) -> None:
    spec = make_own_spec("greedy", 1, {"call_format": "harmony"})
    with pytest.raises(InvalidRequest, match=message):
        resolve_python(spec, [make_model(extra=server)])
