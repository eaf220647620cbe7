"""The probability that the best answer of a search is right."""

from __future__ import annotations

from collections.abc import Sequence

from reasoner.answers.votes import Vote, group_equivalent
from reasoner.confidence.posterior import Evidence, leader_probability
from reasoner.search.search import Search
from reasoner.strategies.base import AnswerLeader, Choice, count_abstained
from reasoner.tree import Node

DEFAULT_CONFIDENCE = 0.95
"""Confidence at which a search stops if neither the job nor a calibration table sets one."""


async def estimate_posterior(search: Search) -> Choice:
    """Return the likeliest answer among all candidates, with the probability that it is right.

    A rule's score is the probability. With a calibration table for the job's models, the probability is computed from
    scores and votes. Otherwise it is the posterior probability that the leading answer keeps the majority, with each
    vote weighted by the score if there is one. This is conservative: a single candidate is never certain, and samples
    that state no answer count together as a rival.
    """
    candidates = search.candidates()
    abstained = count_abstained(search.root.walk(), candidates)
    groups = await group_equivalent(candidates, search.spec.answer, search.equivalence)
    if not groups:
        return Choice(None, abstained=abstained)
    chosen = [max(group, key=lambda node: -1.0 if node.score is None else node.score) for group in groups]
    table = search.calibration
    if table is not None:
        evidence = [Evidence(num_independent(group), best.score) for group, best in zip(groups, chosen, strict=True)]
        silent = [Evidence(abstained, None)] if abstained else []
        weights = [table.curve.predict([*evidence, *silent], index) for index in range(len(groups))]
        confidence = max(weights)
    elif search.has_verifier and search.spec.has_conclusive_verifier:
        weights = [best.score or 0.0 for best in chosen]
        confidence = max(weights)
    else:
        least = _find_least_score(chosen)
        weights = [_weigh(group, least) for group in groups]
        confidence = leader_probability(weights, abstained * sum(weights) / len(candidates))
    votes = [
        Vote(answer=group[0].answer or "", count=len(group), weight=w) for group, w in zip(groups, weights, strict=True)
    ]
    order = sorted(range(len(groups)), key=lambda index: -weights[index])
    total = sum(weights) * (len(candidates) + abstained) / len(candidates)
    leaders = [AnswerLeader(chosen[index], weights[index] / total if total > 0 else None) for index in order]
    return Choice(
        chosen[order[0]], confidence, votes=[votes[index] for index in order], abstained=abstained, leaders=leaders
    )


def num_independent(group: Sequence[Node]) -> int:
    """Return the number of an answer's candidates with different first steps; those with a common one count as one."""
    return len({node.path[0] for node in group})


def meets_confidence(search: Search, choice: Choice) -> bool:
    """Return True if the choice reaches the confidence of the job, else the table's, else ``DEFAULT_CONFIDENCE``.

    A flexible answer reaches it only by a rule, since it loses its vote as soon as a strict one arrives.
    """
    if choice.node is not None and choice.node.answer_level == "flexible" and not search.spec.has_conclusive_verifier:
        return False
    goal = search.spec.confidence
    if goal is None:
        goal = DEFAULT_CONFIDENCE if search.calibration is None else search.calibration.confidence
    return choice.confidence is not None and choice.confidence >= goal


def _find_least_score(chosen: Sequence[Node]) -> float | None:
    """Return the lowest score among the best candidates of the answers, ``None`` if none of them has one."""
    return min((node.score for node in chosen if node.score is not None), default=None)


def _weigh(group: Sequence[Node], least: float | None) -> float:
    """Return the weight of an answer's votes, each one's score if it has one.

    An answer on which the verifier gave no verdict counts as the worst one with a score, ``least``.
    """
    if least is not None and all(node.score is None for node in group):
        return least * len(group)
    return sum(1.0 if node.score is None else node.score for node in group)
