"""Selection: rank solutions that the client brought, by a vote, a verifier or a tournament, without writing any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reasoner.answers.votes import count_votes, group_equivalent
from reasoner.jobs.job import RankedCandidate
from reasoner.jobs.request import By, Schedule, SelectionRule
from reasoner.jobs.spec import SELECTING_STRATEGY
from reasoner.search.candidates import select_candidates
from reasoner.search.search import Search
from reasoner.strategies.base import (
    Choice,
    DecidedBy,
    Feature,
    Params,
    Strategy,
    VerifierUse,
    choose_best_scored,
    elect,
    weigh_by_score,
)
from reasoner.strategies.merging.tournament import find_players, hold_tournament
from reasoner.tree import Node

_USES: Mapping[SelectionRule | None, VerifierUse] = {
    None: VerifierUse.OPTIONAL,
    "majority": VerifierUse.NONE,
    "weighted": VerifierUse.SCORES,
    "verifier": VerifierUse.SCORES,
    "tournament": VerifierUse.COMPARISONS,
}


class Select(Params):
    by: By = None
    schedule: Schedule = "swiss"


async def run(search: Search, params: Select) -> Choice:
    """Rank the client's own candidates by the verifier, a vote or a tournament; the first of the ranking wins."""
    nodes = await search.add_candidates()
    rule = params.by or ("verifier" if search.has_verifier else "majority")
    if rule == "tournament":
        choice = await hold_tournament(search, find_players(search, nodes), params.schedule)
        return replace(choice, ranking=_rank_players(nodes, choice.standings))
    if rule in ("verifier", "weighted"):
        await search.score(nodes)
    if rule == "verifier":
        ranked = sorted(nodes, key=lambda node: -1.0 if node.score is None else node.score, reverse=True)
        answered = select_candidates(nodes, search.spec)
        choice = choose_best_scored(answered) if answered else Choice(None if ranked[0].score is None else ranked[0])
        return replace(choice, ranking=_rank_scored(ranked, choice.node))
    return await _rank_by_votes(search, nodes, is_weighted=rule == "weighted")


async def _rank_by_votes(search: Search, nodes: Sequence[Node], *, is_weighted: bool) -> Choice:
    """Rank by the share of each candidate's answer; those without an answer come last."""
    voters = select_candidates(nodes, search.spec)
    weights = weigh_by_score(voters) if is_weighted else dict.fromkeys(voters, 1.0)
    counted = count_votes(await group_equivalent(voters, search.spec.answer, search.equivalence), weights)
    choice = elect(counted, weights, len(nodes) - len(voters))
    shares = {
        node: leader.share or 0.0
        for leader, (_, members) in zip(choice.leaders or (), counted, strict=True)
        for node in members
    }
    order = sorted(nodes, key=lambda node: (-shares.get(node, -1.0), -weights.get(node, 0.0), node.path))
    if choice.node is not None:
        order.sort(key=lambda node: node is not choice.node)
    return replace(choice, ranking=[_describe(node, share=shares.get(node)) for node in order])


def _rank_scored(nodes: Sequence[Node], chosen: Node | None) -> list[RankedCandidate]:
    """Return the ranking of nodes sorted by their scores, the chosen one first."""
    return [_describe(node) for node in sorted(nodes, key=lambda node: node is not chosen)]


def _rank_players(nodes: Sequence[Node], standings: Sequence[Mapping[str, Any]]) -> list[RankedCandidate]:
    """Return the ranking of a tournament; those that did not take part come last."""
    by_id = {node.id: node for node in nodes}
    ranked = [_describe(by_id[row["node"]], strength=row["strength"], best=row["best"]) for row in standings]
    present = {row["node"] for row in standings}
    return ranked + [_describe(node) for node in nodes if node.id not in present]


def _describe(node: Node, **more: float | None) -> RankedCandidate:
    return RankedCandidate(
        index=node.path[-1],
        node=node.id,
        answer=node.answer,
        answer_level=node.answer_level,
        score=node.score,
        **more,
    )


STRATEGY = Strategy(
    SELECTING_STRATEGY,
    Select,
    run=run,
    verifier=lambda params: _USES[params.by],
    decided_by=DecidedBy.VOTE,
    supports={Feature.CANDIDATES},
)
