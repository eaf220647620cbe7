"""The verifiers, by the ``kind`` that a job names (``reasoner.jobs.verifier_specs``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from reasoner.jobs.verifier_specs import load_verifier_kinds
from reasoner.search.scoring import NodeScorer, PairScorer
from reasoner.verifiers import generative, graded, judge, outcome, pairwise, probe, rules, steps
from reasoner.verifiers.context import VerifierContext

OPENERS: Mapping[str, Callable[[VerifierContext], Awaitable[NodeScorer | PairScorer]]] = {
    "prm": steps.open_prm,
    "judge": judge.open_judge,
    "outcome": outcome.open_outcome,
    "probe": probe.open_probe,
    "generative": generative.open_generative,
    "pairwise": pairwise.open_pairwise,
    "graded": graded.open_graded,
}
"""Functions that open the service's own models."""


@runtime_checkable
class Opens(Protocol):
    """The model of a verifier of another package that opens itself."""

    async def open(self, context: VerifierContext) -> NodeScorer | PairScorer:
        """Open the verifier for one job, as the functions of ``OPENERS`` do; one that ``compares`` as a pair scorer."""
        ...


async def open_scorer(context: VerifierContext) -> NodeScorer:
    """Open the job's verifier. Raises ``InvalidRequest`` and ``EngineError`` if that is not possible."""
    return cast(NodeScorer, await _open(context))


async def open_comparer(context: VerifierContext) -> PairScorer:
    """Open the job's verifier, which compares. Raises like ``open_scorer``."""
    return cast(PairScorer, await _open(context))


async def _open(context: VerifierContext) -> NodeScorer | PairScorer:
    verifier = context.spec.verifier
    assert verifier is not None  # checked by the caller
    if verifier.kind in OPENERS:
        return await OPENERS[verifier.kind](context)
    if isinstance(verifier, Opens):
        return await verifier.open(context)
    return await rules.open_rule(context)


def describe_verifiers() -> dict[str, dict[str, Any]]:
    """Return a summary and the JSON schema of the fields of every kind of verifier."""
    return {
        kind: {
            "summary": (plugin.value.__doc__ or "").strip().split("\n\n")[0].replace("\n", " "),
            "package": plugin.package,
            "scores_steps": plugin.value.scores_steps,
            "compares": plugin.value.compares,
            "parameters": plugin.value.model_json_schema(),
        }
        for kind, plugin in load_verifier_kinds().items()
    }
