"""What a search believes of the answers that it has."""

from __future__ import annotations

from collections.abc import Sequence

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.votes import Vote, group_equivalent
from reasoner.confidence.posterior import Evidence, leader_probability
from reasoner.search.search import Search
from reasoner.strategies.base import Choice
from reasoner.tree import Node

DEFAULT_CONFIDENCE = 0.95
"""Where a search that stops when it is sure stops, if neither the job nor a table says."""


async def estimate_posterior(search: Search, equivalence: Equivalence) -> Choice:
    """The likeliest answer among all candidates, and how probable it is that it is right.

    A rule knows: its score is the probability. With a table that holds for the job's models the probability is the
    table's, from scores and votes. Else it is the posterior that the leader stays the leader, each candidate voting
    with its score if it has one. That is careful: a single candidate is never certain, however high its score.
    """
    groups = await group_equivalent(search.candidates(), search.spec.answer, equivalence)
    if not groups:
        return Choice(None)
    chosen = [max(group, key=lambda node: -1.0 if node.score is None else node.score) for group in groups]
    table = search.calibration
    if table is not None:
        evidence = [Evidence(num_independent(group), best.score) for group, best in zip(groups, chosen, strict=True)]
        weights = [table.curve.predict(evidence, place) for place in range(len(groups))]
        confidence = max(weights)
    elif search.has_verifier and search.spec.has_conclusive_verifier:
        weights = [best.score or 0.0 for best in chosen]
        confidence = max(weights)
    else:
        weights = [sum(_weight(node) for node in group) for group in groups]
        confidence = leader_probability(weights)
    votes = [
        Vote(answer=group[0].answer or "", count=len(group), weight=w) for group, w in zip(groups, weights, strict=True)
    ]
    leader = max(range(len(groups)), key=lambda place: weights[place])
    return Choice(chosen[leader], confidence, sorted(votes, key=lambda vote: -vote.weight))


def num_independent(group: Sequence[Node]) -> int:
    """How many of an answer's candidates part at the question. Branches of one first step repeat each other: they are
    no votes of their own."""
    return len({node.path[0] for node in group})


def meets_confidence(search: Search, choice: Choice) -> bool:
    """Whether the choice passes the confidence that the job asks for, else the table's, else ``DEFAULT_CONFIDENCE``."""
    goal = search.spec.confidence
    if goal is None:
        goal = DEFAULT_CONFIDENCE if search.calibration is None else search.calibration.confidence
    return choice.confidence is not None and choice.confidence >= goal


def _weight(node: Node) -> float:
    return 1.0 if node.score is None else node.score
