"""Registry of strategies by name, those of other packages included.

Each is decision logic on a ``Search`` with a pydantic model of its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import iscoroutinefunction
from typing import Any

from reasoner.plugins import OWN_PACKAGE, STRATEGIES_GROUP, PluginError, explain_unusable, load_plugins
from reasoner.strategies import auto
from reasoner.strategies.base import Feature, Params, Strategy
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
STRATEGY_PACKAGES = dict.fromkeys(STRATEGIES, OWN_PACKAGE)
"""The package of each strategy."""


def _read_plugin(value: object) -> tuple[str, Strategy[Any]]:
    if not isinstance(value, Strategy):
        raise PluginError(f"a {type(value).__name__}, not a Strategy (reasoner.strategies.base)")
    if not (isinstance(value.params, type) and issubclass(value.params, Params)):
        raise PluginError("its 'params' is no subclass of Params (reasoner.strategies.base)")
    if "name" in value.params.model_fields:
        raise PluginError("a parameter cannot be called 'name', which in a job is the strategy's own")
    if not iscoroutinefunction(value.run):
        raise PluginError("its 'run' is no async function")
    try:
        value.params.model_json_schema()
    except Exception as error:
        raise PluginError(f"its parameters have no JSON schema: {error}") from error
    return value.name, value


for _plugin in load_plugins(STRATEGIES_GROUP, STRATEGIES.keys(), _read_plugin):
    STRATEGIES[_plugin.name], STRATEGY_PACKAGES[_plugin.name] = _plugin.value, _plugin.package


def parse_params(name: str, params: Mapping[str, Any]) -> Params:
    """Return a strategy's validated parameters with defaults. Raises ``ValueError`` with a correction."""
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ValueError(f"unknown strategy {name!r}; known are {known}{explain_unusable(STRATEGIES_GROUP)}")
    parsed: Params = STRATEGIES[name].parse(params)
    return parsed


def describe_strategies() -> dict[str, dict[str, Any]]:
    """Return a summary and the JSON schema of the parameters of every strategy."""
    return {
        name: {
            "summary": (strategy.run.__doc__ or "").strip().split("\n")[0],
            "package": STRATEGY_PACKAGES.get(name),
            "needs_verifier": strategy.needs_verifier,
            "takes_candidates": Feature.CANDIDATES in strategy.supports,
            "samples_several": Feature.SEVERAL_MODELS in strategy.supports,
            "stops_when_sure": Feature.EARLY_STOP in strategy.supports,
            "parameters": strategy.params.model_json_schema(),
        }
        for name, strategy in STRATEGIES.items()
    }
