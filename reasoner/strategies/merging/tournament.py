"""A tournament: solutions are compared in pairs, and the strongest wins. It needs no answer that could be extracted.

Sources: Bradley and Terry 1952 for the strengths; knockouts of sampled solutions as in Chen et al. 2024, "Simple and
Provable Scaling Laws for the Test-Time Compute of Large Language Models", section 3.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from reasoner.confidence.bradley_terry import Match, fit_strengths
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.jobs.request import ScheduleName
from reasoner.jobs.spec import COMPARING_STRATEGY
from reasoner.search.candidates import list_finished
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Feature, Params, Strategy, VerifierUse
from reasoner.strategies.merging.schedules import SCHEDULES
from reasoner.tree import Node, Reads


class Tournament(Params):
    n: Annotated[int, Field(ge=2, le=MAX_N, description="Solutions to sample; a tournament needs two.")] = 8
    schedule: Annotated[
        ScheduleName,
        Field(
            description="Who meets whom: knockout (n - 1 matches), swiss (n / 2 log2 n), or pivot, in which all meet "
            "the same few (n log2 n, in one round)."
        ),
    ] = "swiss"


async def run(search: Search, params: Tournament) -> Choice:
    """Sample n solutions and let a model compare them in pairs; the strongest by the Bradley-Terry model wins.

    The confidence is the probability that it is the strongest. With ``confidence`` the tournament ends as soon as one
    solution has it.
    """
    async for _ in search.complete(*search.spread(params.n)):
        pass
    finished = find_players(search, list_finished(search.root.walk()))
    return await hold_tournament(search, finished, params.schedule)


def find_players(search: Search, nodes: Sequence[Node]) -> list[Node]:
    """Return the solutions that have what the verifier reads, such as an answer after a thought."""
    reads: Reads = getattr(search.spec.verifier, "reads", "all")
    return [node for node in nodes if node.read_text(reads).strip()]


async def hold_tournament(search: Search, players: Sequence[Node], schedule: ScheduleName) -> Choice:
    """Compare the players round by round; return the strongest, with the standings of all as a decision."""
    if len(players) < 2:
        return Choice(players[0] if players else None)  # nobody to compare it with
    rounds, results = SCHEDULES[schedule](len(players), search.rng(search.root, "tournament")), None
    matches: list[Match] = []
    num_rounds = num_undecided = 0
    standings = await _find_standings(search, players, matches, 0)
    while not search.is_budget_exhausted and not _is_decided(search, standings):
        try:
            pairs = next(rounds) if results is None else rounds.send(results)
        except StopIteration:
            break
        scores = await search.compare([(players[first], players[second]) for first, second in pairs])
        found = [scores.get((players[first], players[second])) for first, second in pairs]
        matches += [Match(*pair, score) for pair, score in zip(pairs, found, strict=True) if score is not None]
        results = [0.5 if score is None else score for score in found]
        num_undecided += sum(score is None for score in scores.values())
        num_rounds += 1
        standings = await _find_standings(search, players, matches, num_rounds)
    await search.record_decision(
        "standings", {"matches": len(matches), "without_verdict": num_undecided, "players": standings}
    )
    best = standings[0]
    chosen = next(node for node in players if node.id == best["node"])
    return Choice(chosen, best["best"] if matches else None, standings=standings)


async def _find_standings(
    search: Search, players: Sequence[Node], matches: Sequence[Match], num_rounds: int
) -> list[dict[str, Any]]:
    """Return the players, strongest first, with their strengths; recorded, since another machine rounds otherwise."""

    async def fit() -> str:
        strengths = fit_strengths(len(players), matches)
        best = strengths.best_probabilities()
        table: list[dict[str, Any]] = [
            {
                "node": player.id,
                "strength": round(float(strengths.means[index]), 4),
                "error": round(float(strengths.errors[index]), 4),
                "best": round(float(best[index]), 4),
            }
            for index, player in enumerate(players)
        ]
        return json.dumps(sorted(table, key=lambda row: -row["strength"]))

    found = await search.record_result(f"standings:{num_rounds}", fit)
    assert found is not None
    standings: list[dict[str, Any]] = json.loads(found)
    return standings


def _is_decided(search: Search, standings: Sequence[dict[str, Any]]) -> bool:
    confidence = search.spec.confidence
    return confidence is not None and bool(standings[0]["best"] >= confidence)


STRATEGY = Strategy(
    COMPARING_STRATEGY,
    Tournament,
    run,
    VerifierUse.COMPARISONS,
    supports={Feature.CONSTRAINT, Feature.SEVERAL_MODELS, Feature.EARLY_STOP},
)
