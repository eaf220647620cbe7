"""Auto: estimate the difficulty of the question, run the strategies that suit it, and stop when the answer is certain.

The probe is a few samples. The probability that their best answer is right estimates the difficulty, by which a table
fitted by ``reasoner calibrate`` selects the stages: strategies and their sample counts, run in turn on the same tree.
The samples of the probe and of all earlier stages are candidates. Sources: Snell et al. 2024, "Scaling LLM Test-Time
Compute Optimally", section 3 (strategy and compute by estimated difficulty); Weitzman 1979, "Optimal Search for the
Best Alternative" (each next stage runs only while the best answer so far is not good enough).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from reasoner.answers.votes import group_equivalent
from reasoner.confidence.calibration import Calibration
from reasoner.confidence.novelty import compute_gain
from reasoner.jobs.spec import StrategySpec
from reasoner.search.search import Search
from reasoner.strategies.answer_posterior import estimate_posterior, meets_confidence
from reasoner.strategies.base import Choice, DecidedBy, Feature, Params, Samples, Strategy, VerifierUse

NUM_PROBES = 2


class Auto(Params):
    n: Samples = 16
    """Upper limit of the ``n`` of every stage."""
    family: Annotated[
        str | None, Field(max_length=128, description="Family of tasks of the calibration that the question is one of.")
    ] = Field(None, exclude_if=lambda family: family is None)

    @property
    def calibration_family(self) -> str | None:
        return self.family


def create_strategy(stages: Mapping[str, Strategy[Any]]) -> Strategy[Auto]:
    """Return the strategy ``auto``, whose table may name any of ``stages``."""

    async def run(search: Search, params: Auto) -> Choice:
        """Sample a probe, select strategies by the estimated difficulty, and stop when the answer is certain."""
        table = search.calibration
        probe = min(params.n, NUM_PROBES if table is None else table.probe)
        await sample_stepwise(search, probe)
        choice = await score_and_estimate(search)
        plan = (
            plan_doubling(search, probe, params.n) if table is None else table.select_stages(choice.confidence or 0.0)
        )
        await search.record_decision(
            "plan",
            {
                "calibrated": table is not None,
                **({} if search.calibration_gap is None else {"uncalibrated": search.calibration_gap}),
                "confidence": choice.confidence,
                "stages": [stage.model_dump() for stage in plan],
            },
        )
        for stage in plan:
            if meets_confidence(search, choice) or search.is_budget_exhausted or not _is_worth_more(table, choice):
                break
            strategy = stages[stage.name]
            amount = stage.params | ({"n": min(params.n, stage.params["n"])} if "n" in stage.params else {})
            await strategy.run(search, strategy.parse(amount))
            choice = await score_and_estimate(search)
        return choice

    supports = {Feature.CONSTRAINT, Feature.EARLY_STOP}
    return Strategy("auto", Auto, run=run, verifier=VerifierUse.OPTIONAL, decided_by=DecidedBy.VOTE, supports=supports)


def _is_worth_more(table: Calibration | None, choice: Choice) -> bool:
    """Return False if the table says that more samples are unlikely to bring a better answer."""
    counts = [vote.count for vote in choice.votes]
    return table is None or compute_gain(choice.confidence or 0.0, counts, choice.abstained or 0) >= table.least_gain


async def sample_stepwise(search: Search, count: int) -> None:
    """Sample solutions step by step, so that a tree search can continue from any of their steps.

    They are sampled as a whole where the policy's server cannot continue them.
    """
    async with search.stream() as stream:
        if not search.can_continue:
            stream.complete([search.root], count)
        else:
            stream.expand([search.root], count)
        async for nodes in stream:
            stream.expand([node for node in nodes if node.open], 1)


async def score_and_estimate(search: Search) -> Choice:
    """Score one candidate of each answer without a score, and return the posterior."""
    if search.has_verifier:
        groups = await group_equivalent(search.candidates(), search.spec.answer, search.equivalence)
        await search.score([group[0] for group in groups if all(node.score is None for node in group)])
    return await estimate_posterior(search)


def plan_doubling(search: Search, done: int, n: int) -> list[StrategySpec]:
    """Return the stages used without a table: votes that double the number of samples up to ``n``.

    Votes are weighted by the verifier's scores if there is one. Nothing else is assumed about unknown models.
    """
    name, stages = "weighted_vote" if search.has_verifier else "self_consistency", []
    while done < n:
        more = min(done, n - done)
        stages.append(StrategySpec.model_validate({"name": name, "n": more}))
        done += more
    return stages
