"""Registry of strategies by name. Each is decision logic on a ``Search`` with a pydantic model of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reasoner.strategies import auto
from reasoner.strategies.base import Params, Strategy
from reasoner.strategies.merging import aggregate, select, synthesize, tournament
from reasoner.strategies.sampling import (
    best_of_n,
    budget_forcing,
    deepconf,
    early_exit,
    first_finished,
    greedy,
    revise,
    self_consistency,
    weighted_vote,
)
from reasoner.strategies.tree import ab_mcts, beam, best_first, dvts, lookahead, mcts, particle, rebase

_STAGES: dict[str, Strategy[Any]] = {
    strategy.name: strategy
    for strategy in (
        greedy.STRATEGY,
        self_consistency.STRATEGY,
        best_of_n.STRATEGY,
        weighted_vote.STRATEGY,
        beam.STRATEGY,
        revise.STRATEGY,
        budget_forcing.STRATEGY,
        deepconf.STRATEGY,
        early_exit.STRATEGY,
        first_finished.STRATEGY,
        dvts.STRATEGY,
        lookahead.STRATEGY,
        rebase.STRATEGY,
        mcts.STRATEGY,
        particle.STRATEGY,
        best_first.STRATEGY,
        ab_mcts.STRATEGY,
        tournament.STRATEGY,
        aggregate.STRATEGY,
        synthesize.STRATEGY,
        select.STRATEGY,
    )
}

STRATEGIES: dict[str, Strategy[Any]] = {**_STAGES, "auto": auto.create_strategy(_STAGES)}


def parse_params(name: str, params: Mapping[str, Any]) -> Params:
    """Return a strategy's validated parameters with defaults. Raises ``ValueError`` with a correction."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known are {', '.join(STRATEGIES)}")
    parsed: Params = STRATEGIES[name].parse(params)
    return parsed


def describe_strategies() -> dict[str, dict[str, Any]]:
    """Return a summary and the JSON schema of the parameters of every strategy."""
    return {
        name: {
            "summary": (strategy.run.__doc__ or "").strip().split("\n")[0],
            "needs_verifier": strategy.needs_verifier,
            "takes_candidates": strategy.takes_candidates,
            "samples_several": strategy.samples_several,
            "stops_when_sure": strategy.stops_when_sure,
            "parameters": strategy.params.model_json_schema(),
        }
        for name, strategy in STRATEGIES.items()
    }
