"""Narration and response events of hand-written journals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from api.conversation import streaming
from api.conversation.narration import Narration
from api.openai.responses.body import EchoedFields
from api.openai.responses.events import ResponseEvents
from reasoner.budget.usage import Usage
from reasoner.jobs.events import Event
from reasoner.jobs.job import JobResult
from tests.specs import build_spec

SPEC = build_spec(
    {
        "problem": "?",
        "strategy": {"name": "weighted_vote", "n": 3},
        "budget": {"tokens": 900, "seconds": 1.5},
        "seed": 1,
    }
).model_dump()
JOB: dict[str, Any] = {"id": "job_" + "a" * 32, "status": "queued", "created_at": 1.0, "spec": SPEC | {"model": "m"}}


class Journal:
    """Creates events in the format of the store."""

    def __init__(self) -> None:
        self._seq = count(1)

    def event(self, kind: str, **data: Any) -> Event:
        return Event(seq=next(self._seq), type=kind, at=2.0, data=data)

    def node(self, node: str, answer: str | None = None, tokens: int = 10, **more: Any) -> Event:
        parts = {"parent": node.rpartition(".")[0], "text": "", "logprob": 0.0, "final": True, "reason": "stop"}
        return self.event("node", node=node, answer=answer, tokens=tokens, **(parts | more))

    def score(self, node: str, score: float) -> Event:
        return self.event("score", node=node, scores=[score], score=score, computed=1, cached=0)

    def end(self, status: str = "completed", **result: Any) -> Event:
        fields = {"answer": None, "text": None, "confidence": None, "finish_reason": "answer", "node": None} | result
        usage = Usage(generated=100, verifier_computed=20).model_dump()
        whole = JobResult(**fields).model_dump() if result else None
        error = {"code": "engine_error", "message": "it broke"} if status == "failed" else None
        return self.event(f"job.{status}", result=whole, error=error, usage=usage)


def told(events: list[Event], **how: Any) -> str:
    narration = Narration(SPEC, **how)
    return "".join(narration.add(event) for event in events)


def a_vote() -> list[Event]:
    write = Journal()
    return [
        write.event("job.queued"),
        write.event("job.started", attempt=1),
        write.node("0", "4"),
        write.node("1", "5"),
        write.node("2", "4.0"),
        write.score("0", 0.25),
        write.score("1", 0.75),
        write.score("2", 0.875),
        write.event("prune", nodes=["1"]),
        write.end(answer="4", text="so 4", node="2", confidence=0.5),
    ]


def test_every_branch_and_every_new_leader_is_narrated() -> None:
    assert told(a_vote()).splitlines() == [
        "Searching by weighted_vote of 3.",
        "Branch 0: 4.",
        "Leading: 4, 1 of 1.",
        "Branch 1: 5.",
        "Branch 2: 4.0.",
        "Leading: 5, score 0.75, 1 of 3.",
        "Leading: 4, score 0.88, 2 of 3.",
        "Pruned: 1.",
        "Chosen: 4, confidence 0.5, 120 tokens.",
    ]


def test_a_concise_narration_omits_single_branches() -> None:
    whole, concise = told(a_vote()).splitlines(), told(a_vote(), concise=True).splitlines()
    assert concise == [line for line in whole if not line.startswith(("Branch", "Pruned"))]


def test_a_step_is_narrated_when_it_is_finished_and_an_interruption_without_its_address() -> None:
    write = Journal()
    events = [
        write.event("job.started", attempt=1),
        write.node("0", final=False),
        write.node("0", reason="step"),
        write.node("0.0", reason="length"),
        write.event("job.queued", reason="engine_unavailable", detail="http://10.0.0.7 is away"),
        write.event("job.resumed", attempt=1),
        write.event("decision", stages=[{"name": "beam"}, {"name": "mcts"}]),
    ]
    assert told(events).splitlines()[1:] == [
        "Branch 0: step.",
        "Branch 0.0: length.",
        "Waiting: engine unavailable.",
        "Resumed.",
        "After a probe: beam, then mcts.",
    ]


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (Journal().end("failed"), "Failed: it broke.\n"),
        (Journal().end("cancelled"), "Cancelled: 120 tokens.\n"),
        (Journal().end("incomplete", finish_reason="budget"), "No answer: 120 tokens.\n"),
    ],
)
def test_each_kind_of_end_is_narrated(end: Event, line: str) -> None:
    assert told([end]) == line


def test_visible_tokens_are_those_of_the_chosen_solution_without_thinking() -> None:
    write = Journal()
    narration = Narration(SPEC)
    for event in [
        write.node("0", tokens=7, fresh=True),
        write.node("0.0", tokens=30, reason="step"),
        write.node("0.0.0", "4", tokens=10),
        write.node("0.0.1", "5", tokens=13),
        write.end(answer="4", text="<think>" + "x" * 22 + "</think>It is 4.", node="0.0.0"),
    ]:
        narration.add(event)
    assert narration.end is not None
    assert narration.end.content == "It is 4."
    assert narration.end.num_visible_tokens == round(40 * len("It is 4.") / len("<think></think>It is 4." + "x" * 22))


@pytest.mark.parametrize(
    ("status", "answer", "text", "message"),
    [
        ("completed", "4", "so 4", ("completed", "so 4")),
        ("cancelled", "4", "so 4", ("incomplete", "so 4")),
        ("cancelled", None, "so f", ("incomplete", "so f")),
        ("cancelled", None, None, None),
        ("incomplete", None, "so f", ("incomplete", "so f")),
    ],
)
def test_a_response_has_the_best_solution_however_its_search_ended(
    status: str, answer: str | None, text: str | None, message: tuple[str, str] | None
) -> None:
    write, stream = Journal(), ResponseEvents(JOB, EchoedFields())
    events = [write.event("job.started", attempt=1), write.end(status, answer=answer, text=text)]
    told = [found for event in events for found in stream.add(event)] + stream.close()
    messages = [item for item in told[-1]["response"]["output"] if item["type"] == "message"]
    assert [(item["status"], item["content"][0]["text"]) for item in messages] == ([] if message is None else [message])
    done = [found["item"] for found in told if found["type"] == "response.output_item.done"]
    assert done[1:] == messages


def test_sequence_numbers_stay_unique_when_a_failed_job_is_retried() -> None:
    write = Journal()
    first = [write.event("job.queued"), write.event("job.started", attempt=1), write.end("failed")]
    then = [
        write.event("job.queued", reason="retry", detail="tried again"),
        write.event("job.resumed", attempt=2),
        write.end(answer="4", text="so 4", node=None),
    ]
    before, after = ResponseEvents(JOB, EchoedFields()), ResponseEvents(JOB, EchoedFields())
    failed = [found for event in first for found in before.add(event)] + before.close()
    whole = [found for event in first + then for found in after.add(event)] + after.close()
    assert (failed[-1]["type"], whole[-1]["type"]) == ("response.failed", "response.completed")
    by_number = {found["sequence_number"]: found for found in whole}
    assert all(by_number.get(found["sequence_number"], found) == found for found in failed)
    assert len(by_number) == len(whole)
    assert [found["type"] for found in whole].count("response.failed") == 0


async def test_a_silent_stream_gets_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.001)
    reached, sent = asyncio.Event(), []

    async def events() -> AsyncIterator[str]:
        yield "data: 1\n\n"
        await reached.wait()  # set by the second comment
        yield "data: 2\n\n"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"").decode())
        if sent.count(": keep-alive\n\n") == 2:
            reached.set()

    stream = streaming.EventStream(events())
    async with asyncio.timeout(60):
        await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, _never, send)
    assert [part for part in sent if part.startswith("data")] == ["data: 1\n\n", "data: 2\n\n"]


async def _never() -> Any:
    await asyncio.Event().wait()


def test_stored_events_give_the_same_narration() -> None:
    stored = [Event.model_validate(json.loads(json.dumps(event.model_dump()))) for event in a_vote()]
    assert told(stored) == told(a_vote())


def test_comparisons_standings_and_scores_without_a_verdict_are_told() -> None:
    write = Journal()
    players = [
        {"node": "1", "strength": 0.7, "best": 0.85},
        {"node": "0", "strength": -0.7, "best": 0.15},
    ]
    text = told(
        [
            write.node("0", answer="4"),
            write.node("1", answer="5"),
            write.event("score", node="0", scores=[], score=None, computed=1, cached=0),
            write.event("compare", nodes=["0", "1"], score=0.25, computed=9, cached=0),
            write.event("compare", nodes=["1", "0"], score=None, computed=9, cached=0),
            write.event("decision", matches=2, without_verdict=1, players=players),
            write.event("decision", shown=["0", "1"]),
        ]
    )
    assert "Compared 0 with 1: 0.25 for 0.\nCompared 1 with 0: no verdict.\n" in text
    assert "Strongest of 2: 1, with probability 0.85.\n" in text
    assert "Reading 2 solutions: 0, 1.\n" in text
