"""Votes: candidates grouped by equivalent answers. A candidate without an answer is in no group."""

from __future__ import annotations

from collections.abc import Sequence

from reasoner.answers.canonical import canonicalize
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.plain import differs_plainly
from reasoner.answers.spec import AnswerSpec, Compare
from reasoner.base_model import StrictModel
from reasoner.tree import Node


class Vote(StrictModel):
    """One class of equivalent answers: the number of candidates that state it, and their total weight."""

    answer: str
    count: int
    weight: float


async def group_equivalent(candidates: Sequence[Node], spec: AnswerSpec, equivalence: Equivalence) -> list[list[Node]]:
    """Group candidates by equivalent answer, in order of first appearance.

    Canonical forms are compared first. For mathematical answers, differing forms that are not plain
    (``reasoner.answers.plain``) are compared with algebra. An answer belongs to a class if it equals the class's first
    answer and plainly differs from none in it: 3 cm and 3 m both equal 3, but no class contains both.
    """
    groups: dict[str, list[Node]] = {}
    forms: dict[str, list[str]] = {}
    class_of: dict[str, str] = {}
    for node in candidates:
        if node.answer is None:
            continue
        form = find_vote_form(node, spec.compare)
        if form not in class_of:
            first = form
            if spec.compare == "math" and node.vote is None:
                possible = [
                    key for key, others in forms.items() if not any(differs_plainly(form, other) for other in others)
                ]
                first = await equivalence.representative(form, possible)
            class_of[form] = first
            if node.vote is None:
                forms.setdefault(first, []).append(form)
        groups.setdefault(class_of[form], []).append(node)
    return list(groups.values())


def find_vote_form(node: Node, compare: Compare) -> str:
    """Return a text that is the same for candidates with equal answers, where that needs no algebra."""
    return canonicalize(node.answer or "", compare) if node.vote is None else f"\0{node.vote}"


def count_votes(groups: Sequence[Sequence[Node]], weights: dict[Node, float]) -> list[tuple[Vote, list[Node]]]:
    """Return one vote per class by decreasing weight; ties in order of first appearance."""
    counted = [
        (Vote(answer=group[0].answer or "", count=len(group), weight=sum(weights[node] for node in group)), list(group))
        for group in groups
    ]
    return sorted(counted, key=lambda pair: -pair[0].weight)
