"""Self-consistency: sample several solutions and return the most frequent answer.

Source: Wang et al. 2022, "Self-Consistency Improves Chain of Thought Reasoning in Language Models", section 2. Early
stopping: Aggarwal et al. 2023 and Li et al. 2024 (``reasoner.confidence.stopping_rules``).

With a stopping rule, a sample starts when the rule is certain to need it: four at once for ``beta`` at 0.95, more as
they disagree. So no token is wasted, and the vote counts exactly the samples of sequential sampling. The cost is
latency: a hard problem takes several rounds of samples. ``ahead`` starts more than are certainly needed, and unneeded
ones are cancelled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from reasoner.answers.votes import group_equivalent
from reasoner.confidence.stopping_rules import num_needed_by_beta, num_needed_by_window
from reasoner.jobs.candidate_spec import MAX_N
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, DecidedBy, Feature, Params, Samples, Strategy, choose_by_majority
from reasoner.tree import Node


class SelfConsistency(Params):
    n: Samples = 16
    stop: Annotated[
        Literal["none", "beta", "window"],
        Field(
            description="When to stop early: never, when the leader is sure enough to stay it, or when all samples of "
            "a window agree."
        ),
    ] = "none"
    # A job's ``confidence`` implies ``beta`` with that threshold.
    threshold: Annotated[
        float, Field(gt=0.5, le=1, description="How sure for 'beta'; 1 waits until nothing can change the winner.")
    ] = 0.95
    window: Annotated[int, Field(ge=2, le=64, description="Samples of a window.")] = 4
    ahead: Annotated[
        int, Field(ge=0, le=MAX_N, description="Samples in flight beyond those that are certain to be needed.")
    ] = 0


async def run(search: Search, params: SelfConsistency) -> Choice:
    """Sample up to n solutions; the most frequent answer wins, and its share of the votes is the confidence."""
    started, arrived = 0, list[Node]()
    async with search.stream() as stream:
        while (needed := await _count_needed(search, params, arrived)) > len(arrived):
            more = min(params.n, needed + params.ahead) - started
            if more > 0:
                stream.complete(*search.spread(started + more, started))
                started += more
            nodes = await anext(stream, None)
            if nodes is None:
                break
            arrived += nodes
    candidates = search.candidates()
    choice = await choose_by_majority(search, candidates, dict.fromkeys(candidates, 1.0))
    return choice if params.n > 1 else replace(choice, confidence=None)  # nothing agrees with a single sample


async def _count_needed(search: Search, params: SelfConsistency, arrived: list[Node]) -> int:
    """Return the total number of samples that the vote is certain to need.

    Only strict answers end it early: a flexible one loses its vote as soon as a strict one arrives.
    """
    # No early stopping as a stage of another strategy, which has a stopping rule of its own.
    confidence = search.spec.confidence if search.spec.strategy.name == STRATEGY.name else None
    if params.stop == "none" and confidence is None:
        return params.n
    ordered = sorted(arrived, key=search.sample_number)
    strict = [node for node in ordered if node.answer_level == "strict"]
    groups = await group_equivalent(strict, search.spec.answer, search.equivalence)
    classes = {node: index for index, group in enumerate(groups) for node in group}
    answers = {search.sample_number(node): classes.get(node) for node in ordered}
    if params.stop == "window" and confidence is None:
        return num_needed_by_window(answers, params.n, params.window)
    return num_needed_by_beta(answers, params.n, params.threshold if confidence is None else confidence)


STRATEGY = Strategy(
    "self_consistency",
    SelfConsistency,
    run,
    decided_by=DecidedBy.VOTE,
    supports={Feature.CONSTRAINT, Feature.SEVERAL_MODELS, Feature.EARLY_STOP},
)
