"""The strategies, by name. Each is decision logic on a ``Search`` with a pydantic model of its own parameters."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from reasoner.strategies import auto
from reasoner.strategies.base import Choice, Params, Strategy
from reasoner.strategies.sampling import (
    best_of_n,
    budget_forcing,
    deepconf,
    greedy,
    revise,
    self_consistency,
    weighted_vote,
)
from reasoner.strategies.tree import beam, best_first, dvts, lookahead, mcts, particle, rebase

STRATEGIES: dict[str, Strategy[Any]] = {
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
        dvts.STRATEGY,
        lookahead.STRATEGY,
        rebase.STRATEGY,
        mcts.STRATEGY,
        particle.STRATEGY,
        best_first.STRATEGY,
        auto.STRATEGY,
    )
}

__all__ = ["STRATEGIES", "Choice", "Params", "Strategy", "resolve", "schemas"]


def resolve(name: str, params: dict[str, Any]) -> Params:
    """The strategy's parameters, checked and with their defaults. ``ValueError`` says what would be right."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known are {', '.join(STRATEGIES)}")
    model = STRATEGIES[name].params
    try:
        checked: Params = model.model_validate(params)
    except ValidationError as error:
        known = ", ".join(model.model_fields) or "none"
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'parameters'}: {problem['msg']}" for problem in error.errors()
        )
        raise ValueError(f"strategy {name!r}: {problems} (its parameters: {known})") from None
    return checked


def schemas() -> dict[str, dict[str, Any]]:
    """What can be asked for: a summary and the JSON schema of the parameters of every strategy."""
    return {
        name: {
            "summary": (strategy.run.__doc__ or "").strip().split("\n")[0],
            "needs_verifier": strategy.needs_verifier,
            "stops_when_sure": strategy.stops_when_sure,
            "parameters": strategy.params.model_json_schema(),
        }
        for name, strategy in STRATEGIES.items()
    }
