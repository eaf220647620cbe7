"""Chat completions of a thinking model, from the journal of a real search on an engine whose prompts open a thought."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from api.conversation.narration import Narration, ReasoningContent
from api.http.search_tree import build_tree
from api.openai.chat.answer import build_completion, stream_chunks
from reasoner.jobs.events import Event
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.view import fold_events
from reasoner.run import JobOutcome, run_job
from tests.scripted import ScriptedEngine
from tests.specs import build_spec

SEED = 3
SPEC: dict[str, Any] = {"problem": "how?", "model": "policy", "verifier": None, "seed": SEED}


async def events_of(strategy: str, *, thinks: bool) -> tuple[list[Event], JobOutcome]:
    """Return the events of a job as the store has them, and its outcome."""
    spec = build_spec(SPEC | {"strategy": {"name": strategy}})
    journal = MemoryJournal()
    outcome = await run_job(spec, ScriptedEngine(thinks=thinks), journal)
    events = [Event(seq=1, type="job.started", at=1.0, data={"attempt": 1})]
    events += [Event(seq=seq, type=e.type, at=1.0, data=e.data) for seq, e in enumerate(journal.entries, 2)]
    data = {"result": outcome.result.model_dump(), "error": None, "usage": outcome.usage.model_dump()}
    return [*events, Event(seq=len(events) + 1, type=f"job.{outcome.status}", at=2.0, data=data)], outcome


def job(strategy: str) -> Any:
    spec = build_spec(SPEC | {"strategy": {"name": strategy}}).model_dump()
    return {"id": "job_" + "a" * 32, "status": "queued", "created_at": 1.0, "spec": spec | {"metadata": {}}}


async def streamed(events: list[Event], strategy: str, wanted: ReasoningContent | None) -> tuple[str, str]:
    """Return the reasoning and the content of a stream."""

    async def follow() -> AsyncIterator[Event]:
        for event in events:
            yield event

    document = job(strategy)
    reasoning, content = "", ""
    async for line in stream_chunks(document, Narration(document["spec"]), follow(), usage=False, wanted=wanted):
        if line != "[DONE]":
            delta = json.loads(line)["choices"][0]["delta"]
            reasoning += delta.get("reasoning_content", "")
            content += delta.get("content", "")
    return reasoning, content


@pytest.mark.parametrize("strategy", ["greedy", "self_consistency"])
async def test_reasoning_content_is_the_chosen_thought_and_the_content_what_follows_it(strategy: str) -> None:
    events, outcome = await events_of(strategy, thinks=True)
    document = job(strategy)
    narration = Narration(document["spec"])
    for event in events:
        narration.add(event)
    assert narration.end is not None
    text = outcome.result.text or ""
    thought, _, answer = text.partition("</think>")
    for wanted, reasoning in ((None, thought.strip()), ("thought", thought.strip()), ("narration", narration.text)):
        kind: Literal["thought", "narration"] | None = wanted  # type: ignore[assignment]
        message = build_completion(document, narration, narration.end, kind).choices[0].message
        assert (message.reasoning_content, message.content) == (reasoning, answer.strip("\n"))
        told, content = await streamed(events, strategy, kind)
        assert content == answer.strip("\n")
        assert told == (reasoning if wanted is not None else f"{narration.text.splitlines()[0]}\n{reasoning}")


async def test_the_reasoning_tokens_of_a_single_solution_are_those_of_its_thought() -> None:
    events, outcome = await events_of("greedy", thinks=True)
    document = job("greedy")
    narration = Narration(document["spec"])
    for event in events:
        narration.add(event)
    assert narration.end is not None
    usage = build_completion(document, narration, narration.end, None).usage
    assert usage.completion_tokens_details.reasoning_tokens == outcome.usage.thought > 0
    assert usage.completion_tokens == outcome.usage.generated


async def test_the_narration_of_a_model_that_does_not_think_stays() -> None:
    events, _ = await events_of("self_consistency", thinks=False)
    told, _ = await streamed(events, "self_consistency", None)
    assert told.startswith("Searching by self_consistency")
    assert "Chosen:" in told


async def test_the_parts_of_a_node_cover_its_text_in_the_tree() -> None:
    events, _ = await events_of("self_consistency", thinks=True)
    nodes = build_tree("job", fold_events(events)).nodes
    assert nodes
    for node in nodes:
        assert sum(part.chars for part in node.parts) == len(node.text)
        assert sum(part.tokens for part in node.parts) == node.tokens
        assert node.parts[0].kind == "thought"
