"""Python in the middle of solutions: state, bill, replay, limits and refusals, whatever the strategy."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.protocol.types import Branch, EngineUnavailable, InvalidRequest
from prm.scorers.steps import StepScorer
from reasoner.admission.refusal import JobRefused
from reasoner.jobs.journal import JobCancelled, MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.jobs.tool_specs import PYTHON_INSTRUCTION
from reasoner.run import JobOutcome, run_job
from reasoner.sandbox import lockdown
from reasoner.sandbox.cells import CellLimits, CellResult, Ending
from reasoner.sandbox.runner import SandboxRefused
from reasoner.search.replay import BILLED_ONLY
from reasoner.strategies.registry import STRATEGIES
from reasoner.tools import python
from reasoner.tree import read_parts
from tests.long import mostly_long
from tests.reasoner.search.test_thoughts import nodes_of
from tests.scripted import CONTEXT, TEXTS, ScriptedEngine
from tests.specs import build_spec
from tests.strategies import COMPARING, WRITING

CALL = 5
COUNT = "\n```python\nn = globals().get('n', 0) + 1\nprint('call', n)\n```"
OUTPUT = re.compile(r"```output\n(.*?)\n?```\n", re.DOTALL)
SEEDS = st.integers(0, 10_000)
SAME_PATCHES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class CallingEngine(ScriptedEngine):
    """Engine whose solutions call Python now and then."""

    def token(self, branch: Branch, position: int, temperature: float) -> int:
        token = super().token(branch, position, temperature)
        return CALL if 32 <= token < 36 else token


class Sandbox:
    """A sandbox without processes, for cells that count how many there are. It keeps the calls that ended."""

    def __init__(self) -> None:
        self.calls: list[Sequence[str]] = []
        self.ended: Ending = "ok"
        self.output: str | None = None

    async def run_cells(self, cells: Sequence[str], limits: CellLimits, *, locked: bool = True) -> CellResult:
        assert locked
        assert limits.seconds > 0
        for _ in range(len(cells) % 3):
            await asyncio.sleep(0)
        self.calls.append(cells)
        return CellResult(self.output or f"call {len(cells)}\n", self.ended, 0.25)


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox = Sandbox()
    monkeypatch.setitem(TEXTS, CALL, COUNT)
    monkeypatch.setattr(python, "run_cells", sandbox.run_cells)
    monkeypatch.setattr("reasoner.run.check_lockdown", lambda *_: asyncio.sleep(0))
    return sandbox


def make_spec(
    strategy: str, seed: int, tool: dict[str, Any] | None = None, n: int | None = None, **more: Any
) -> JobSpec:
    params = {} if n is None else {"n": n}
    fields: dict[str, Any] = {"problem": "how?", "seed": seed, "strategy": {"name": strategy} | params}
    fields["answer"] = "text"
    fields |= {"tools": [{"type": "python", "instruction": None} | (tool or {})], "budget": {"tokens": 4000}}
    if not STRATEGIES[strategy].needs_verifier and strategy not in COMPARING:
        fields["verifier"] = None
    return build_spec(fields | more)


async def solve(
    spec: JobSpec, journal: MemoryJournal | None = None, engine: ScriptedEngine | None = None
) -> JobOutcome:
    return await run_job(spec, engine or CallingEngine(), MemoryJournal() if journal is None else journal)


def solutions(journal: MemoryJournal) -> dict[str, str]:
    """Return the text of every node's conversation, by the node's id."""
    texts: dict[str, str] = {"": ""}
    for name, entries in nodes_of(journal).items():
        own, data = "".join(entry.data["text"] for entry in entries), entries[-1].data
        above = "" if data.get("fresh") else texts[data["parent"]]
        texts[name] = above[: len(above) - data.get("undone", 0)] + own
    return texts


def check(journal: MemoryJournal, outcome: JobOutcome, engine: ScriptedEngine) -> None:
    """Check that every call has its own branch's state, and that nothing but generated tokens is billed.

    A text that a strategy adds may spoil a call, whose output is then an error, and which takes no time.
    """
    outputs = injected = faulty = 0
    for entries in nodes_of(journal).values():
        parts = read_parts(entries[-1].data)
        text = "".join(entry.data["text"] for entry in entries)
        assert sum(part.num_chars for part in parts) == len(text) or not parts
        start = 0
        for part in parts:
            own = text[start : start + part.num_chars]
            assert (part.origin == "tool") == own.lstrip("\n").startswith("```output")
            injected += part.num_tokens * (part.origin == "tool" and "copy_of" not in entries[-1].data)
            start += part.num_chars
        outputs += sum("call_ended" in entry.data for entry in entries)
        faulty += sum("call_ended" in entry.data and "output\nerror:" in entry.data["text"] for entry in entries)
    for text in solutions(journal).values():
        found = [output for output in OUTPUT.findall(text) if not output.startswith("error:")]
        assert found == [f"call {n}" for n in range(1, len(found) + 1)]
    assert outcome.usage.tool_calls == outputs
    assert outcome.usage.tool_seconds == 0.25 * (outputs - faulty)
    assert outcome.usage.generated == len(engine.generated)
    assert len(set(engine.generated)) == len(engine.generated)
    assert engine.most <= 4000


@pytest.mark.parametrize("strategy", mostly_long(WRITING, every=4))
@given(seed=SEEDS)
@settings(SAME_PATCHES, max_examples=12)
async def test_every_strategy_goes_on_with_the_output_and_branches_share_no_state(
    sandbox: Sandbox, strategy: str, seed: int
) -> None:
    journal, engine = MemoryJournal(), CallingEngine(order=seed)
    outcome = await solve(make_spec(strategy, seed), journal, engine)
    check(journal, outcome, engine)


async def test_calls_are_frequent_enough_to_be_tested(sandbox: Sandbox) -> None:
    outcome = await solve(make_spec("self_consistency", 1, n=64))
    assert outcome.usage.tool_calls > 30
    assert max(map(len, sandbox.calls)) >= 3


@pytest.mark.parametrize("strategy", mostly_long(["best_of_n", "beam", "mcts", "self_consistency", "rebase"], every=3))
@given(seed=SEEDS, die_after=st.integers(1, 60))
@settings(SAME_PATCHES, max_examples=15)
async def test_a_replay_gives_the_same_result_and_runs_no_code_twice(
    sandbox: Sandbox, strategy: str, seed: int, die_after: int
) -> None:
    spec = make_spec(strategy, seed, deterministic=True)
    sandbox.calls.clear()
    expected = await solve(spec)
    ran = len(sandbox.calls)
    journal = MemoryJournal()
    with contextlib.suppress(EngineUnavailable):
        await solve(spec, journal, CallingEngine(die_after=die_after))
    journaled = sum("call_ended" in entry.data for entry in journal.entries)
    lost = sum(entry.type == BILLED_ONLY for entry in journal.entries)
    sandbox.calls.clear()
    again = await solve(spec, journal)
    assert again.result.answer == expected.result.answer
    assert again.result.text == expected.result.text
    if not lost:
        assert len(sandbox.calls) == ran - journaled


async def test_what_the_journal_holds_runs_never_again(sandbox: Sandbox) -> None:
    spec, journal = make_spec("best_of_n", 3), MemoryJournal()
    outcome = await solve(spec, journal)
    assert outcome.usage.tool_calls
    calls = [index for index, entry in enumerate(journal.entries) if "call_ended" in entry.data]
    for end in (calls[0], calls[0] + 1, calls[-1] + 1, len(journal.entries)):
        sandbox.calls.clear()
        batch = journal.entries[end].data["batch"] if end < len(journal.entries) else None
        entries = [entry for entry in journal.entries[:end] if entry.data["batch"] != batch]  # written as a whole
        known = sum("call_ended" in entry.data for entry in entries)
        again = await solve(spec, MemoryJournal(entries))
        assert again.usage.tool_calls == known + len(sandbox.calls)
    assert sandbox.calls == []


@pytest.mark.parametrize("ended", ["timeout", "memory", "output", "died"])
async def test_a_call_at_a_limit_ends_its_branch_alone(sandbox: Sandbox, ended: Ending) -> None:
    run = sandbox.run_cells

    async def run_cells(cells: Sequence[str], limits: CellLimits, *, locked: bool = True) -> CellResult:
        result = await run(cells, limits, locked=locked)
        return CellResult("so far", ended, 2.0) if len(sandbox.calls) == 2 else result

    journal = MemoryJournal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python, "run_cells", run_cells)
        outcome = await solve(make_spec("self_consistency", 5, n=16), journal)
    ends = [entries[-1].data for entries in nodes_of(journal).values()]
    [hurt] = [end for end in ends if end["reason"] == "tool"]
    assert hurt["call_ended"] == ended
    assert re.search(r"```output\nso far\nended: .*\n```\n$", hurt["text"])
    assert hurt["answer"] is None or "call" not in hurt["answer"]
    assert outcome.result.answer is not None


async def test_one_call_more_than_allowed_ends_the_solution(sandbox: Sandbox) -> None:
    journal = MemoryJournal()
    await solve(make_spec("self_consistency", 1, {"calls": 1}, n=32), journal)
    assert {len(cells) for cells in sandbox.calls} == {1}
    ended = [entries[-1].data for entries in nodes_of(journal).values() if entries[-1].data["reason"] == "tool"]
    assert ended
    assert all(end["text"].endswith(COUNT) for end in ended)


async def test_a_long_output_leaves_half_of_the_tokens(sandbox: Sandbox) -> None:
    sandbox.output = "x" * 2000
    journal = MemoryJournal()
    await solve(make_spec("self_consistency", 2, n=16), journal)
    outputs = [entry.data for entry in journal.entries if "call_ended" in entry.data]
    assert outputs
    for output in outputs:
        assert output["tokens"] < CONTEXT / 2
        assert "characters left out" in output["text"] or not output["text"]


async def test_verifiers_read_the_output_and_answers_are_not_found_in_it(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.output = "\\boxed{7}"
    read: list[str] = []
    original = StepScorer.steps

    def record(self: StepScorer, text: str, **more: Any) -> Any:
        read.append(text)
        return original(self, text, **more)

    monkeypatch.setattr(StepScorer, "steps", record)
    journal = MemoryJournal()
    await solve(make_spec("weighted_vote", 2, n=32, answer="math"), journal)
    outputs = {name for name, text in solutions(journal).items() if "```output\n\\boxed{7}\n```" in text}
    assert outputs
    assert any("```output\n\\boxed{7}\n```" in text for text in read)
    assert "7" not in {entries[-1].data["answer"] for entries in nodes_of(journal).values()}


async def test_cancelling_ends_the_calls(sandbox: Sandbox) -> None:
    cancelled, began = asyncio.Event(), 0

    async def never(*_: Any, **__: Any) -> CellResult:
        nonlocal began
        began += 1
        cancelled.set()
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            began -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python, "run_cells", never)
        with pytest.raises(JobCancelled):
            await run_job(make_spec("best_of_n", 3), CallingEngine(), MemoryJournal(), cancelled=cancelled)
    assert cancelled.is_set()
    assert began == 0


async def test_a_call_beyond_the_jobs_time_ends_its_branch_with_the_time(sandbox: Sandbox) -> None:
    async def never(*_: Any, **__: Any) -> CellResult:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    journal = MemoryJournal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python, "run_cells", never)
        outcome = await solve(make_spec("self_consistency", 1, budget={"seconds": 0.5}), journal)
    assert outcome.result.finish_reason == "budget"
    assert "timeout" in {entries[-1].data["reason"] for entries in nodes_of(journal).values()}


async def test_the_instruction_is_in_the_system_message() -> None:
    tools = [{"type": "python"}]
    system = {"role": "system", "content": PYTHON_INSTRUCTION}
    assert build_spec({"problem": "x", "tools": tools}).to_messages()[0] == system
    own = build_spec({"problem": "x", "system": "Be brief.", "tools": tools}).to_messages()
    assert own[0]["content"] == f"Be brief.\n\n{PYTHON_INSTRUCTION}"
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}]
    theirs = build_spec({"messages": messages, "tools": tools}).to_messages()
    assert theirs[0]["content"] == f"Be kind.\n\n{PYTHON_INSTRUCTION}"
    silent = build_spec({"problem": "x", "tools": [{"type": "python", "instruction": None}]})
    assert [message["role"] for message in silent.to_messages()] == ["user"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"constraint": {"choice": ["a", "b"]}}, "no constraint can hold the output of a tool"),
        ({"answer": {"compare": "code"}}, "a block of Python is a call"),
        (
            {"verifier": {"kind": "python", "tests": ["assert f"]}, "answer": {}},
            "verifier 'python' reads a block of code",
        ),
        ({"stop": ["```"]}, "in the middle of a call"),
        ({"candidates": ["a", "b"]}, "nothing calls a tool"),
    ],
)
async def test_jobs_that_cannot_use_a_tool_are_refused(fields: dict[str, Any], message: str) -> None:
    engine = CallingEngine()
    with pytest.raises(JobRefused, match=message):
        await solve(make_spec("select" if "candidates" in fields else "self_consistency", 1, **fields), engine=engine)
    assert engine.generated == []


async def test_without_a_sandbox_no_token_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise SandboxRefused("there is no filter of system calls for plan9")

    monkeypatch.setattr(lockdown, "run_tests", refuse)
    engine = CallingEngine()
    with pytest.raises(InvalidRequest, match=r"no sandbox for a model's Python.*plan9.*REASONER_UNLOCKED_TESTS"):
        await solve(make_spec("self_consistency", 1), engine=engine)
    assert engine.generated == []
