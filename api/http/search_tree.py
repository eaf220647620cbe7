"""The search tree as the API shows it."""

from __future__ import annotations

from pydantic import BaseModel

from reasoner.jobs.view import JobView
from reasoner.tree import AnswerLevel, Origin, PartKind


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


def build_tree(job_id: str, view: JobView) -> Tree:
    """Return the search tree of a job."""
    return Tree(
        job=job_id,
        nodes=[
            TreeNode(
                id=name,
                parent=node.parent.id,
                text=node.text,
                tokens=node.tokens,
                logprob=node.logprob,
                scores=node.step_scores,
                score=node.score,
                state=node.reason or "live",
                reason=node.end_reason,
                parts=[
                    TreePart(kind=part.kind, origin=part.origin, chars=part.num_chars, tokens=part.num_tokens)
                    for part in node.parts
                ],
                model=node.model,
                verdicts=[TreeVerdict.model_validate(verdict) for verdict in node.verdicts],
                refusal=None if node.refusal is None else node.refusal.message,
                answer=node.answer,
                answer_level=node.answer_level,
            )
            for name, node in list(view.nodes.items())  # another thread may add some meanwhile
            if node.parent is not None
        ],
        matches=[TreeMatch.model_validate(comparison) for comparison in view.comparisons],
        best=view.best,
    )
