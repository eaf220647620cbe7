"""Votes: candidates grouped by equivalent answers. A candidate without an answer is in no group."""

from __future__ import annotations

from collections.abc import Sequence

from reasoner.answers.canonical import canonicalize
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.plain import count_details, differs_plainly
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
    answer and plainly differs from none in it: 3 cm and 3 m both equal 3, but no class contains both. So that the order
    of the candidates decides nothing, answers that say most come first, and one that fits several classes, as 3 does,
    is counted for the largest.
    """
    nodes: dict[str, list[Node]] = {}
    for node in candidates:
        if node.answer is not None:
            nodes.setdefault(find_vote_form(node, spec.compare), []).append(node)
    class_of = {form: form for form in nodes}
    if spec.compare == "math":
        counts = {form: len(members) for form, members in nodes.items() if members[0].vote_key is None}
        class_of |= await _classify(counts, equivalence)
    groups: dict[str, list[Node]] = {}
    for node in candidates:
        if node.answer is not None:
            groups.setdefault(class_of[find_vote_form(node, spec.compare)], []).append(node)
    return list(groups.values())


async def _classify(counts: dict[str, int], equivalence: Equivalence) -> dict[str, str]:
    """Return the first form of its class for each form of an answer, from the forms' numbers of votes."""
    classes: dict[str, list[str]] = {}
    class_of: dict[str, str] = {}
    for form in sorted(counts, key=lambda form: (-count_details(form), -counts[form], form)):
        possible = [key for key, others in classes.items() if not any(differs_plainly(form, other) for other in others)]
        possible.sort(key=lambda key: (-sum(counts[other] for other in classes[key]), key))
        class_of[form] = await equivalence.representative(form, possible)
        classes.setdefault(class_of[form], []).append(form)
    return class_of


def find_vote_form(node: Node, compare: Compare) -> str:
    """Return a text that is the same for candidates with equal answers, where that needs no algebra."""
    return canonicalize(node.answer or "", compare) if node.vote_key is None else f"\0{node.vote_key}"


def count_votes(groups: Sequence[Sequence[Node]], weights: dict[Node, float]) -> list[tuple[Vote, list[Node]]]:
    """Return one vote per class by decreasing weight; ties in order of first appearance."""
    counted = [
        (Vote(answer=group[0].answer or "", count=len(group), weight=sum(weights[node] for node in group)), list(group))
        for group in groups
    ]
    return sorted(counted, key=lambda pair: -pair[0].weight)
