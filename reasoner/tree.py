"""The search tree. A node is a piece of a solution: the tokens that one branch added to its parent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

Reason = Literal[
    "step", "said", "answer", "stop", "length", "context", "repetition", "budget", "timeout", "cancelled", "pruned"
]
"""Why a branch ended. ``step``: at a step separator, so it can be expanded. ``said``: the search itself wrote it, to be
continued. ``answer``: its answer is stated. ``stop``: the model ended it. ``length``: the job's own limit for one
solution, or the strategy's. ``context``: the model's context is full. ``repetition``: it only said again what it had
said. ``budget``, ``timeout``: the budget cut it. ``cancelled``: it was stopped while it grew. ``pruned``: the search
gave it up."""


@dataclass(slots=True, eq=False)
class Node:
    """``prefix`` is the handle to the node's KV: all token ids from the prompt through this node."""

    path: tuple[int, ...]
    parent: Node | None
    prefix: tuple[int, ...]
    text: str = ""
    tokens: int = 0
    """Tokens of this node alone."""
    logprob: float = 0.0
    """Log-probability of its tokens as they were sampled: 0 where the job's sampling takes the likeliest one."""
    reason: Reason | None = None
    answer: str | None = None
    scores: tuple[float, ...] = ()
    """The verifier's scores of all steps from the root through this node, in order; empty until scored, and where a
    verifier judges solutions as a whole."""
    score: float | None = None
    """The verifier's score of the solution up to here; ``None`` until scored."""
    confidence: tuple[float, ...] = ()
    """How sure the model was of each of its tokens (``reasoner.confidence.token_confidence``), where that was asked
    for."""
    fresh: bool = False
    """Whether it begins a conversation of its own: solutions below start after it."""
    closed: bool = False
    """Whether its last token only ended the text: what is said next takes its place."""
    undone: int = 0
    """Characters at the end of the text above that this node took back."""
    is_copy: bool = False
    """Nothing was generated for it: the sampling law leaves no other branch than one that was there already."""
    children: list[Node] = field(default_factory=list)
    created: int = 0
    """Children that were ever asked for: the next child's index."""

    @property
    def id(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def open(self) -> bool:
        """Whether the branch can be continued."""
        return self.reason in (None, "step", "said")

    def lineage(self) -> list[Node]:
        """The nodes of this node's conversation, from below its beginning to this one."""
        nodes = []
        node: Node = self
        while node.parent is not None and not node.fresh:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def written(self) -> tuple[int, ...]:
        """The tokens after the prompt of its conversation."""
        lineage = self.lineage()
        beginning = lineage[0].parent if lineage else self
        return self.prefix[len(beginning.prefix) if beginning is not None else 0 :]

    @property
    def solution(self) -> str:
        text = ""
        for node in self.lineage():
            text = text[: len(text) - node.undone] + node.text
        return text

    @property
    def depth_tokens(self) -> int:
        """Generated tokens of its conversation through this node."""
        return sum(node.tokens for node in self.lineage())

    def walk(self) -> Iterator[Node]:
        """This node and all below it, parents first, in order of creation."""
        yield self
        for child in self.children:
            yield from child.walk()


def unseen(siblings: Iterable[Node]) -> float:
    """Return the probability that one more sample beside these is none of them (0 to 1)."""
    return max(0.0, 1.0 - sum({node.text: math.exp(node.logprob) for node in siblings}.values()))


def find_most_promising(root: Node) -> Node | None:
    """Return the end of the branch that the verifier likes best, of those that were not given up."""
    live = [node for node in root.walk() if node.parent is not None and node.reason != "pruned"]
    return find_best_leaf([node for node in live if all(child.reason == "pruned" for child in node.children)])


def find_best_leaf(ends: Sequence[Node]) -> Node | None:
    """Return the one that the verifier likes best, and of those that it likes equally or knows nothing of the one that
    came furthest."""
    return max(
        sorted(ends, key=lambda node: node.path),
        key=lambda node: (-1.0 if node.score is None else node.score, node.depth_tokens),
        default=None,
    )


def make_branch_key(path: tuple[int, ...]) -> int:
    """The noise key of a node: 63 bits that depend on its path alone, so that no two branches of a job share noise."""
    return int.from_bytes(blake2b(".".join(map(str, path)).encode(), digest_size=8).digest(), "big") >> 1
