"""First finished: start k solutions, let the first m that finish vote, and cancel the others.

Source: Hassid et al. 2025, "Don't Overthink it. Preferring Shorter Thinking Chains for Improved LLM Reasoning"
(short-m@k), section 4: of several thoughts about one question the shortest are the most often right. Of equally
frequent answers the one whose solution is shortest wins.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from reasoner.jobs.candidate_spec import MAX_N
from reasoner.search.candidates import select_candidates
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, DecidedBy, Params, Samples, Strategy, choose_by_majority
from reasoner.tree import Node


class FirstFinished(Params):
    n: Samples = 8
    first: Annotated[
        int, Field(ge=1, le=MAX_N, description="Solutions that vote; the others are cancelled.", validate_default=True)
    ] = 3

    @model_validator(mode="after")
    def _check_enough_samples(self) -> FirstFinished:
        if self.first > self.n:
            raise ValueError(f"first: {self.first} solutions cannot finish of {self.n}: give at most n")
        return self


async def run(search: Search, params: FirstFinished) -> Choice:
    """Start n solutions; the first few that finish vote, and the others are cancelled."""
    finished: list[Node] = []
    async with search.stream() as stream:
        stream.complete([search.root], params.n)
        async for nodes in stream:
            answered = [node for node in nodes if node.answer_level == "strict"]
            finished += sorted(answered, key=lambda node: node.depth_tokens)
            if len(finished) >= params.first:
                break
    candidates = select_candidates(finished[: params.first] or search.root.walk(), search.spec)
    ordered = sorted(candidates, key=lambda node: node.depth_tokens)
    return await choose_by_majority(search, ordered, dict.fromkeys(ordered, 1.0))


STRATEGY = Strategy("first_finished", FirstFinished, run, decided_by=DecidedBy.VOTE)
