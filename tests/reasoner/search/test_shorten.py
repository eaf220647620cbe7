"""Conversations that are too long for a verifier: what is left of them, and that they then fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from reasoner.jobs.candidate_spec import Candidate, Piece, read_candidate
from reasoner.jobs.journal import MemoryJournal
from reasoner.run import run_job
from reasoner.search.brought.shorten import MIN_OUTPUT_CHARS, shorten
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

_KINDS = st.sampled_from(["words", "other", "output"])


async def count(text: str) -> int:
    return len(text)


def join(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def call(id: str, code: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "run", "arguments": f'{{"code": "{code}"}}'}}


def trajectory(*outputs: str, end: str | None = "it is \\boxed{7}") -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "how?"}]
    for index, output in enumerate(outputs):
        messages += [
            {"role": "assistant", "content": f"step {index}", "tool_calls": [call(f"call{index}", f"x{index}")]},
            {"role": "tool", "tool_call_id": f"call{index}", "content": output},
        ]
    return messages if end is None else [*messages, {"role": "assistant", "content": end}]


def read(messages: list[dict[str, Any]]) -> list[Piece]:
    return read_candidate(TypeAdapter(Candidate).validate_python(messages), "how?")


def test_a_trajectory_is_read_with_its_calls_and_their_results() -> None:
    assert join(read(trajectory("12"))) == (
        'Assistant: step 0\n{"name": "run", "arguments": {"code": "x0"}}\n\nTool: 12\n\nAssistant: it is \\boxed{7}'
    )


def test_a_conversation_may_end_with_calls_or_a_result_but_not_with_the_user() -> None:
    assert join(read(trajectory("12", end=None))).endswith("Tool: 12")
    assert read(trajectory("12", end=None)[:-1])[-1].kind == "calls"
    with pytest.raises(ValidationError, match="ends with a message of the assistant, its answer or its calls"):
        read(trajectory("12")[:1])


async def test_the_longest_outputs_lose_their_middles_first() -> None:
    pieces = read(trajectory("z" * 3000, "b" * 600, "c" * 50))
    shorter, left_out = await shorten(pieces, 2000, count)
    text = join(shorter)
    assert "b" * 600 in text
    assert "c" * 50 in text
    beginning, end = text.split(" characters left out]\n")
    assert beginning.rpartition("\n[")[0].endswith("z" * 400)
    assert end.startswith("z" * 400)
    assert int(beginning.rpartition("[")[2]) == 3000 - text.count("z")
    assert left_out == len(join(pieces)) - len(text)
    assert 1900 < len(text) <= 2000


async def test_messages_are_left_out_when_short_outputs_are_not_enough() -> None:
    pieces = read(trajectory(*(str(index) * 500 for index in range(8))))
    shorter, _ = await shorten(pieces, 900, count)
    text = join(shorter)
    assert text.startswith("Assistant: step 0")
    assert text.endswith("Assistant: it is \\boxed{7}")
    assert "messages left out]" in text
    assert "step 7" in text
    assert "step 2" not in text
    assert len(text) <= 900


@given(st.lists(st.tuples(_KINDS, st.integers(0, 900)), min_size=2, max_size=12), st.integers(400, 4000))
async def test_the_result_fits_if_the_first_and_the_last_message_do(
    messages: list[tuple[Any, int]], limit: int
) -> None:
    pieces = [Piece("x" * size, kind, index) for index, (kind, size) in enumerate(messages)]
    shorter, left_out = await shorten(pieces, limit, count)
    text = join(shorter)
    assert (left_out > 0) <= (len(join(pieces)) > limit)
    ends = sum(
        min(len(piece.text), MIN_OUTPUT_CHARS + 40) if piece.kind == "output" else len(piece.text)
        for piece in (pieces[0], pieces[-1])
    )
    assert len(text) <= max(limit, ends + 40)
    if len(join(pieces)) <= limit:
        assert shorter == pieces


async def test_long_trajectories_are_ranked_by_a_verifier_with_a_small_context() -> None:
    spec = build_spec(
        {
            "problem": "how?",
            "model": "policy",
            "strategy": {"name": "select"},
            "candidates": [trajectory("a" * 5000), trajectory("b" * 300, "c" * 6000), trajectory("d", end=None)],
            "verifier": {"kind": "graded"},
        }
    )
    journal = MemoryJournal()
    outcome = await run_job(spec, ScriptedEngine(context=1000), journal)
    nodes = [entry.data for entry in journal.entries if entry.type == "node"]
    assert [node.get("left_out", 0) > 4000 for node in nodes] == [True, True, False]
    assert [node["answer"] for node in nodes] == ["7", "7", None]
    assert all(node["tokens"] < 900 for node in nodes)
    assert all(candidate.score is not None for candidate in outcome.result.ranking)
