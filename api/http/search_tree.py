"""The search tree as a client sees it: a job's journal, folded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from pydantic import BaseModel

from reasoner.jobs.event import Event


class TreeNode(BaseModel):
    """A branch. ``state`` is ``live`` while it grows, then why it ended, or ``pruned``."""

    id: str
    parent: str
    text: str = ""
    tokens: int = 0
    logprob: float = 0.0
    scores: list[float] = []
    """Of the steps that this node added."""
    score: float | None = None
    """Of the whole branch up to here."""
    state: str = "live"
    reason: str | None = None
    answer: str | None = None


class Tree(BaseModel):
    """``best`` is the chosen leaf, once there is one, or the best so far of a cancelled search. The root, ``""``, is
    the problem and not among the nodes."""

    job: str
    nodes: list[TreeNode]
    best: str | None = None


class GrowingTree:
    """The tree that a job's events describe, taken one by one in their order."""

    def __init__(self) -> None:
        self._nodes: dict[str, TreeNode] = {}
        self._best: str | None = None

    def take(self, event: Event) -> None:
        nodes, data = self._nodes, cast(dict[str, Any], event.data)
        match event.type:
            case "node":
                node = nodes.setdefault(data["node"], TreeNode(id=data["node"], parent=data["parent"]))
                node.text += data["text"]  # a branch may arrive in parts
                node.tokens += data["tokens"]
                node.logprob += data["logprob"]
                if data["final"]:
                    node.reason = node.state = data["reason"]
                    node.answer = data["answer"]
            case "score":
                nodes[data["node"]].scores += data["scores"]
                nodes[data["node"]].score = data["score"]
            case "prune":
                for pruned in data["nodes"]:
                    nodes[pruned].state = "pruned"
            case "select":
                self._best = data["node"]
            case "job.cancelled" if data["result"] is not None:
                self._best = data["result"]["node"]

    def of(self, job_id: str) -> Tree:
        return Tree(job=job_id, nodes=list(self._nodes.values()), best=self._best)


def fold(job_id: str, events: Iterable[Event]) -> Tree:
    """Plays a job's events, in their order, into the tree that they describe."""
    growing = GrowingTree()
    for event in events:
        growing.take(event)
    return growing.of(job_id)
