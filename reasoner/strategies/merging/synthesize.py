"""Synthesis: one more solution is written from all of them, or the model names the best one by its index.

Sources: for ``write``, the last step of Wang et al. 2024, "Mixture-of-Agents", section 2.2; for ``select``, GenSelect,
Moshkov et al. 2025, "AIMO-2 Winning Solution", arXiv:2504.16891, section 4.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from reasoner.jobs.candidate_spec import MAX_N
from reasoner.search.candidates import list_finished
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, DecidedBy, Params, Strategy, choose_by_majority, read_answer
from reasoner.strategies.merging.prompts import MergingPrompt, OptionalTemplate
from reasoner.tree import Node

_JUDGMENT = re.compile(r"judge?ment\W{0,8}(\d{1,3})(?!\d)", re.IGNORECASE)


class Synthesize(Params):
    n: Annotated[int, Field(ge=2, le=MAX_N, description="Solutions to sample.")] = 8
    mode: Annotated[
        Literal["write", "select"],
        Field(description="Write one more solution from all of them, or name the best one by its index."),
    ] = "write"
    template: OptionalTemplate = None


async def run(search: Search, params: Synthesize) -> Choice:
    """Sample n solutions; the policy then writes one from all of them, or names the best.

    If it does not, because of the budget or since its text states no answer or index, the vote of the n decides.
    """
    async for _ in search.complete([search.root], params.n):
        pass
    solutions = list_finished(search.root.walk())
    sampled = list(search.root.walk())
    chosen = await merge(search, solutions, params)
    if chosen is not None:
        return Choice(chosen)
    candidates = search.candidates()
    return await choose_by_majority(search, candidates, dict.fromkeys(candidates, 1.0), sampled)


async def merge(search: Search, solutions: list[Node], params: Synthesize) -> Node | None:
    """Return the solution that the policy writes or names; ``None`` if it does neither."""
    is_writing = params.mode == "write"
    prompt = MergingPrompt(search, "aggregate" if is_writing else "select", params.template, is_solution=is_writing)
    started = await prompt.start(search.root, solutions) if len(solutions) > 1 else None
    if started is None:
        await search.record_decision("synthesis", {"mode": params.mode, "shown": [], "chosen": None})
        return None
    conversation, shown = started
    chosen: Node | None = None
    async for [node] in search.complete([conversation], 1):
        if is_writing:
            have_answers = any(other.answer is not None for other in shown)
            chosen = node if node.answer is not None or (node.reason == "stop" and not have_answers) else None
        else:
            chosen = find_named(read_answer(node), shown)
    data = {"mode": params.mode, "shown": [node.id for node in shown], "chosen": chosen and chosen.id}
    await search.record_decision("synthesis", data)
    return chosen


def find_named(text: str, shown: list[Node]) -> Node | None:
    """Return the solution that a text names last; ``None`` if it names none, or a number that no solution has."""
    numbers = [int(number) for number in _JUDGMENT.findall(text)]
    return shown[numbers[-1] - 1] if numbers and 1 <= numbers[-1] <= len(shown) else None


STRATEGY = Strategy("synthesize", Synthesize, run, decided_by=DecidedBy.VOTE)
