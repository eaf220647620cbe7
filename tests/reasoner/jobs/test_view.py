"""The state of a job is the same however many of its events are folded at a time."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

import pytest

from api.http.search_tree import build_tree
from reasoner.jobs.events import Event
from reasoner.jobs.job import JobResult
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.view import JobView, NodeView, fold_events
from reasoner.run import run_job
from tests.scripted import ScriptedEngine
from tests.seeds import shift
from tests.specs import build_spec

STRATEGIES = ["greedy", "best_of_n", "beam", "mcts", "tournament", "budget_forcing"]


async def run_events(strategy: str) -> tuple[list[Event], JobResult]:
    """Run a job, and return its events and its result."""
    spec = build_spec({"problem": "how?", "seed": 3, "strategy": {"name": strategy}})
    journal = MemoryJournal()
    outcome = await run_job(spec, ScriptedEngine(thinks=strategy == "budget_forcing"), journal)
    written: list[tuple[str, dict[str, Any]]] = [(entry.type, entry.data) for entry in journal.entries]
    end = {"result": outcome.result.model_dump(), "error": None, "usage": outcome.usage.model_dump()}
    told = [("job.queued", {}), ("job.started", {"attempt": 1}), *written, (f"job.{outcome.status}", end)]
    events = [Event(seq=seq, type=type, at=0.0, data=data) for seq, (type, data) in enumerate(told, 1)]
    return events, outcome.result


def read_fields(view: JobView) -> dict[str, Any]:
    """Return all that a view holds, with the ids of nodes for nodes."""
    names = [field.name for field in fields(NodeView) if field.name not in ("parent", "children")]
    nodes = {
        name: [getattr(node, field) for field in names] + [[child.id for child in node.children]]
        for name, node in view.nodes.items()
    }
    return vars(view) | {"root": None, "nodes": nodes}


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_folding_any_prefix_and_then_the_rest_is_folding_all(strategy: str) -> None:
    events, result = await run_events(strategy)
    whole, random = fold_events(events), Random(shift(strategy))
    for cut in random.choices(range(len(events) + 1), k=8):
        view = fold_events(events[:cut])
        build_tree("job", view)  # shows it, and changes nothing
        for event in events[cut:]:
            view.apply(event)
        assert read_fields(view) == read_fields(whole)
        assert build_tree("job", view).model_dump_json() == build_tree("job", whole).model_dump_json()
    assert (whole.status, whole.best) == ("completed", result.node)
    if result.node is not None:
        assert whole.nodes[result.node].solution == result.text


async def test_types_and_fields_of_a_newer_version_have_no_effect() -> None:
    events, _ = await run_events("beam")
    newer = [Event(seq=event.seq, type=event.type, at=0.0, data=event.data | {"mood": 1}) for event in events]
    between = [Event(seq=1, type=type, at=0.0, data={"node": "7"}) for type in ("dream", "job.moved")]
    view = fold_events(newer[:4] + between + newer[4:])
    assert build_tree("job", view) == build_tree("job", fold_events(events))
    assert view.status == "completed"


def test_a_pruned_branch_keeps_the_reason_for_which_it_ended() -> None:
    part = {"node": "0", "parent": "", "text": "so", "tokens": 1, "logprob": 0.0, "final": True, "answer": None}
    view = fold_events(
        [
            Event(seq=1, type="node", at=0.0, data=part | {"reason": "step"}),
            Event(seq=2, type="prune", at=0.0, data={"nodes": ["0"]}),
        ]
    )
    assert (view.nodes["0"].reason, view.nodes["0"].end_reason, view.num_pruned) == ("pruned", "step", 1)
