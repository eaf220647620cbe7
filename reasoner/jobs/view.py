"""A job as its events describe it: the fold that everybody reads who shows or judges a search from outside.

The data of events have the fields of ``reasoner.jobs.events``. They are not validated, so that a job of another version
can be shown: types and fields that are unknown here have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from reasoner.jobs.events import Event
from reasoner.jobs.job import Status, find_end
from reasoner.jobs.journal import Entry
from reasoner.tree import Node, Reason, add_end, read_parts


@dataclass(slots=True, eq=False)
class NodeView(Node):
    """A branch without what only its search needs, such as ``prefix``. ``reason`` is ``None`` as long as it lives."""

    end_reason: Reason | None = None
    """Reason for which it ended, also where ``reason`` is ``pruned`` since."""
    stop: str | None = None
    """The job's stop string that ended it."""
    model: str | None = None
    """Model that wrote it, in a job with several."""
    written_tokens: int = 0
    """Tokens that the job wrote: all but those of a client's candidate and of the output of tools."""
    step_scores: list[float] = field(default_factory=list)
    """Scores of the steps that this node added."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """``VerdictData`` of its steps, by a verifier that writes."""
    verifier_tokens: int = 0
    """Tokens that the verifier computed for its last score."""


class JobView:
    """The state of a job after the events so far."""

    def __init__(self) -> None:
        self.status: Status = "queued"
        self.root = NodeView((), None, ())
        self.nodes = {"": self.root}
        """The root and all branches by id, in the order of their first parts."""
        self.comparisons: list[dict[str, Any]] = []
        """``CompareData`` of the comparisons, in their order."""
        self.best: str | None = None
        """The chosen node, or the best so far of a cancelled search."""
        self.best_score: float | None = None
        self.num_ended = 0
        """Number of branches that have ended."""
        self.num_answers = 0
        self.num_pruned = 0
        self.tokens = 0
        """Tokens that the job wrote or its verifier computed."""

    def apply(self, event: Event | Entry) -> None:
        """Add the next event."""
        data: dict[str, Any] = event.data
        match event.type:
            case "node":
                self._add_part(data)
            case "score":
                self._add_score(data)
            case "compare":
                self.comparisons.append(data)
                self.tokens += data["computed"]
            case "prune":
                for name in data["nodes"]:
                    self.nodes[name].reason = "pruned"
                self.num_pruned += len(data["nodes"])
            case "select":
                self.best = data["node"]
            case "job.started" | "job.resumed":
                self.status = "in_progress"
            case _ if (status := find_end(event.type)) is not None:
                self.status = status
                if status == "cancelled" and data["result"] is not None:
                    self.best = data["result"]["node"]

    def _add_part(self, data: dict[str, Any]) -> None:
        name: str = data["node"]
        node = self.nodes.get(name)
        if node is None:
            parent = self.nodes[data["parent"]]
            node = self.nodes[name] = NodeView(tuple(map(int, name.split("."))), parent, ())
            node.is_solution = parent.is_solution and data.get("solves", True)
            parent.children.append(node)
        node.text += data["text"]
        node.tokens += data["tokens"]
        node.logprob += data["logprob"]
        node.model = data.get("model")
        node.parts = read_parts(data)
        node.thought = data["thought"]["state"] if "thought" in data else None
        node.starts_conversation, node.trimmed_chars = data.get("fresh", False), data.get("undone", 0)
        written = 0 if data.get("given") or "call_ended" in data else data["tokens"]
        node.written_tokens += written
        self.tokens += written
        if data["final"]:
            add_end(node, data)
            node.end_reason = node.reason
            node.stop = data.get("stop")
            self.num_ended += 1
            self.num_answers += node.answer is not None

    def _add_score(self, data: dict[str, Any]) -> None:
        node = self.nodes[data["node"]]
        node.score = data["score"]
        node.step_scores += data["scores"]
        node.verdicts = [verdict for step in data.get("verdicts", ()) for verdict in step]
        node.verifier_tokens = data["computed"]
        self.tokens += data["computed"]
        if node.score is not None:
            self.best_score = max(self.best_score or 0.0, node.score)


def fold_events(events: Iterable[Event | Entry]) -> JobView:
    """Return the state of a job after these events, which may be its journal's entries."""
    view = JobView()
    for event in events:
        view.apply(event)
    return view
