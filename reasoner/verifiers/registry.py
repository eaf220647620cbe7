"""The verifiers, by the ``kind`` that a job names (``reasoner.jobs.verifier_specs``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from reasoner.jobs.rule_specs import RuleSpec
from reasoner.jobs.verifier_specs import VERIFIER_KINDS
from reasoner.search.scoring import NodeScorer, PairScorer
from reasoner.verifiers import generative, judge, outcome, pairwise, probe, rules, steps
from reasoner.verifiers.context import VerifierContext

OPENERS: Mapping[str, Callable[[VerifierContext], Awaitable[NodeScorer]]] = {
    "prm": steps.open_prm,
    "judge": judge.open_judge,
    "outcome": outcome.open_outcome,
    "probe": probe.open_probe,
    "generative": generative.open_generative,
    **{kind: rules.open_rule for kind, spec in VERIFIER_KINDS.items() if issubclass(spec, RuleSpec)},
}


COMPARERS: Mapping[str, Callable[[VerifierContext], Awaitable[PairScorer]]] = {"pairwise": pairwise.open_pairwise}


async def open_scorer(context: VerifierContext) -> NodeScorer:
    """Open the job's verifier. Raises ``InvalidRequest`` and ``EngineError`` if that is not possible."""
    verifier = context.spec.verifier
    assert verifier is not None  # checked by the caller
    return await OPENERS[verifier.kind](context)


async def open_comparer(context: VerifierContext) -> PairScorer:
    """Open the job's verifier, which compares. Raises like ``open_scorer``."""
    verifier = context.spec.verifier
    assert verifier is not None  # checked by the caller
    return await COMPARERS[verifier.kind](context)
