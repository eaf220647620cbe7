"""The search tree as the API shows it, built from the events of a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from pydantic import BaseModel

from reasoner.jobs.events import Event
from reasoner.tree import AnswerLevel, Origin, PartKind, read_answer_level, read_parts, read_refusal


class TreePart(BaseModel):
    """A range of a node's text, by its length in characters and tokens; ``injected`` text was not generated."""

    kind: PartKind
    origin: Origin
    chars: int
    tokens: int


class TreeVerdict(BaseModel):
    """A verdict that a model wrote: the mean score of its votes (null: no vote), and what it wrote before each."""

    score: float | None
    votes: list[float | None]
    critiques: list[str]


class TreeMatch(BaseModel):
    """A comparison of two branches. ``score`` is the probability that the first is better; null: no verdict."""

    nodes: tuple[str, str]
    score: float | None
    verdicts: list[TreeVerdict] = []
    """First those with the branches in the order of ``nodes``, then those in the other order."""


class TreeNode(BaseModel):
    """A branch. ``state`` is ``live`` while it is generated, then why it ended, or ``pruned``."""

    id: str
    parent: str
    text: str = ""
    tokens: int = 0
    logprob: float = 0.0
    scores: list[float] = []
    """Scores of the steps that this node added."""
    score: float | None = None
    """Score of the whole branch up to this node."""
    state: str = "live"
    reason: str | None = None
    parts: list[TreePart] = []
    """Thought and answer in its text, one after the other; empty if the model's thoughts are not known."""
    model: str | None = None
    """Model that wrote it, in a job with several."""
    verdicts: list[TreeVerdict] = []
    """Verdicts on its steps, by a verifier that writes."""
    refusal: str | None = None
    """The server's words, of a branch that it refused."""
    answer: str | None = None
    answer_level: AnswerLevel | None = None
    """``strict``: the solution states the answer; ``flexible``: it is its last number or choice letter."""


class Tree(BaseModel):
    """``best`` is the chosen leaf, once there is one, or the best so far of a cancelled search. The root, ``""``, is
    the problem and not among the nodes."""

    job: str
    nodes: list[TreeNode]
    matches: list[TreeMatch] = []
    """Comparisons of two branches, in their order."""
    best: str | None = None


class TreeBuilder:
    """Builds the tree from events that are added one by one, in their order."""

    def __init__(self) -> None:
        self._nodes: dict[str, TreeNode] = {}
        self._matches: list[TreeMatch] = []
        self._best: str | None = None

    def add(self, event: Event) -> None:
        nodes, data = self._nodes, cast(dict[str, Any], event.data)
        match event.type:
            case "node":
                node = nodes.setdefault(data["node"], TreeNode(id=data["node"], parent=data["parent"]))
                node.text += data["text"]  # a branch may arrive in segments
                node.tokens += data["tokens"]
                node.model = data.get("model")
                node.logprob += data["logprob"]
                node.parts = [
                    TreePart(kind=part.kind, origin=part.origin, chars=part.num_chars, tokens=part.num_tokens)
                    for part in read_parts(data)
                ]
                if data["final"]:
                    node.reason = node.state = data["reason"]
                    node.answer, node.answer_level = data["answer"], read_answer_level(data)
                    refusal = read_refusal(data)
                    node.refusal = None if refusal is None else refusal.message
            case "score":
                nodes[data["node"]].scores += data["scores"]
                nodes[data["node"]].score = data["score"]
                steps = data.get("verdicts", ())
                nodes[data["node"]].verdicts = [TreeVerdict(**verdict) for step in steps for verdict in step]
            case "compare":
                verdicts = [TreeVerdict(**verdict) for verdict in data.get("verdicts", ())]
                self._matches.append(TreeMatch(nodes=data["nodes"], score=data["score"], verdicts=verdicts))
            case "prune":
                for pruned in data["nodes"]:
                    nodes[pruned].state = "pruned"
            case "select":
                self._best = data["node"]
            case "job.cancelled" if data["result"] is not None:
                self._best = data["result"]["node"]

    def build(self, job_id: str) -> Tree:
        """Return the tree so far."""
        return Tree(job=job_id, nodes=list(self._nodes.values()), matches=self._matches, best=self._best)


def build_tree(job_id: str, events: Iterable[Event]) -> Tree:
    """Return the tree that the events of a job describe."""
    builder = TreeBuilder()
    for event in events:
        builder.add(event)
    return builder.build(job_id)
