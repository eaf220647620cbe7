"""Giving up unfinished solutions early, by the grades that the verifier gives them on the way.

Every so many tokens a solution is scored as far as it goes. One that is too bad by itself, or beside the best solution
that has ended, is pruned; the last one that is left is not, as long as none has ended. What such solutions would
still have taken is estimated by the mean length of those that ended, and is on the bill as ``Usage.saved``.

Source: Sun et al. 2024, "Fast Best-of-N Decoding via Speculative Rejection", section 4 (a fraction of the candidates is
rejected by partial scores); here each is judged as it arrives, and no solution waits for another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self

from pydantic import Field, model_validator

from reasoner.base_model import StrictModel
from reasoner.jobs.step_specs import SeparatorSteps
from reasoner.search.search import Search
from reasoner.tree import Node


class Abandon(StrictModel):
    """When unfinished solutions are given up."""

    below: Annotated[float | None, Field(ge=0, le=1, description="Score below which a solution is given up.")] = None
    of_best: Annotated[
        float | None,
        Field(gt=0, le=1, description="Fraction of the best score of a solution that has ended, below which it is."),
    ] = None
    every: Annotated[
        int,
        Field(
            ge=16,
            le=32_768,
            description="Tokens between two looks; each waits for the end of a paragraph, for as many again at most.",
        ),
    ] = 256

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.below is None and self.of_best is None:
            raise ValueError("give 'below', a score, or 'of_best', a fraction of the best one, or both")
        return self


async def sample_solutions(search: Search, n: int, abandon: Abandon | None) -> AsyncGenerator[list[Node]]:
    """Yield n solutions as they end, with those that have an answer scored; without those that were given up."""
    async with search.stream() as stream:
        if abandon is None:
            stream.complete(*search.spread(n))
            async for arrived in stream:
                await search.score([node for node in arrived if node.answer is not None])
                yield arrived
            return
        rule = SeparatorSteps(min_tokens=abandon.every, max_tokens=2 * abandon.every)
        stream.expand(*search.spread(n), steps=rule)
        watch = _Watch(search, abandon, num_open=n)
        async for arrived in stream:
            await search.score([node for node in arrived if node.open or node.answer is not None])
            ended = [node for node in arrived if not node.open]
            watch.add_ended(ended)
            abandoned = watch.choose([node for node in arrived if node.open])
            await search.prune(abandoned)
            for node in arrived:
                if node.open and not stream.expand([node], 1, steps=rule):
                    ended.append(node)
            if ended:
                yield ended
        await watch.record()


@dataclass(slots=True)
class _Watch:
    """The solutions that have ended, those that were given up, and the number of the others."""

    search: Search
    abandon: Abandon
    num_open: int
    ended: list[Node] = field(default_factory=list)
    abandoned: list[Node] = field(default_factory=list)

    def add_ended(self, nodes: Sequence[Node]) -> None:
        self.ended += nodes
        self.num_open -= len(nodes)

    def choose(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes to give up, the worst first where one has to be left."""
        bad = [node for node in nodes if node.score is not None and node.score < self._find_bar()]
        bad.sort(key=lambda node: (node.score or 0.0, node.path))
        has_answer = any(node.answer is not None for node in self.ended)
        if not has_answer:
            bad = bad[: max(0, self.num_open - 1)]
        self.num_open -= len(bad)
        self.abandoned += bad
        return bad

    async def record(self) -> None:
        """Write the solutions that were given up, with the tokens that this has saved."""
        if not self.abandoned:
            return
        whole = [node.depth_tokens for node in self.ended if node.reason in ("answer", "stop")]
        mean = sum(whole) / len(whole) if whole else 0.0
        saved = round(sum(max(0.0, mean - node.depth_tokens) for node in self.abandoned))
        await self.search.record_decision(
            "abandoned", {"nodes": sorted(node.id for node in self.abandoned), "saved": saved}, saved=saved
        )

    def _find_bar(self) -> float:
        best = max((node.score for node in self.ended if node.score is not None), default=0.0)
        return max(self.abandon.below or 0.0, (self.abandon.of_best or 0.0) * best)
