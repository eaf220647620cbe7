"""Votes: candidates in classes of equivalent answers. A candidate without an answer is in no class."""

from __future__ import annotations

from collections.abc import Sequence

from reasoner.answer_spec import AnswerSpec
from reasoner.answers.canonical import canonical
from reasoner.equivalence import Equivalence
from reasoner.jobs import Vote
from reasoner.tree import Node


async def classes(candidates: Sequence[Node], how: AnswerSpec, equivalence: Equivalence) -> list[list[Node]]:
    """Groups candidates by equivalent answer, in order of first appearance.

    Canonical forms are compared, and where mathematics is asked for and forms differ that are not both plain numbers,
    math-verify decides.
    """
    groups: dict[str, list[Node]] = {}
    for node in candidates:
        if node.answer is None:
            continue
        form = canonical(node.answer, how.compare)
        if form not in groups and how.compare == "math":
            form = await equivalence.representative(form, list(groups))
        groups.setdefault(form, []).append(node)
    return list(groups.values())


def votes(groups: Sequence[Sequence[Node]], weights: dict[Node, float]) -> list[tuple[Vote, list[Node]]]:
    """One vote for each class, heaviest first; of equally heavy ones the class that appeared first."""
    counted = [
        (Vote(answer=group[0].answer or "", count=len(group), weight=sum(weights[node] for node in group)), list(group))
        for group in groups
    ]
    return sorted(counted, key=lambda pair: -pair[0].weight)
