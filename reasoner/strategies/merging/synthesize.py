"""Synthesis: one more solution is written from all of them, or the model names the best one by its index.

With several models it is a panel: each solves, one may judge, by a report or by a verifier's scores, and one writes. A
judge or writer whose server is away is replaced by the next of the models.

Sources: for ``write``, the last step of Wang et al. 2024, "Mixture-of-Agents", section 2.2; for ``select``, GenSelect,
Moshkov et al. 2025, "AIMO-2 Winning Solution", arXiv:2504.16891, section 4.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from reasoner.jobs.candidate_spec import MAX_N
from reasoner.search.candidates import list_finished
from reasoner.search.search import Search
from reasoner.strategies.base import (
    Choice,
    DecidedBy,
    Feature,
    Params,
    Strategy,
    VerifierUse,
    choose_by_majority,
    read_answer,
)
from reasoner.strategies.merging.prompts import MergingPrompt, OptionalTemplate, PromptName, list_variables
from reasoner.tree import Node

_JUDGMENT = re.compile(r"judge?ment\W{0,8}(\d{1,3})(?!\d)", re.IGNORECASE)


class Synthesize(Params):
    n: Annotated[int, Field(ge=2, le=MAX_N, description="Solutions to sample.")] = 8
    mode: Annotated[
        Literal["write", "select"],
        Field(description="Write one more solution from all of them, or name the best one by its index."),
    ] = "write"
    template: OptionalTemplate = None
    judge: Annotated[
        Literal["none", "report", "verifier"],
        Field(
            description="report: a model first writes where the solutions agree, where they contradict each other, and "
            "what only one of them saw. verifier: they are shown in the order of their scores, the best first."
        ),
    ] = "none"
    judged_by: Annotated[
        str | None, Field(description="The one of the job's models that writes the report; by default the first.")
    ] = None
    written_by: Annotated[
        str | None,
        Field(description="The one of the job's models that writes, or names the best; by default the first."),
    ] = None

    @property
    def members(self) -> dict[str, str]:
        return {name: model for name in ("judged_by", "written_by") if (model := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _check_report(self) -> Self:
        if self.judge == "report" and self.template is not None and "report" not in list_variables(self.template):
            raise ValueError("template: with judge 'report' it must use {{ report }}, or the writer would not see it")
        return self


async def run(search: Search, params: Synthesize) -> Choice:
    """Sample n solutions; a model then writes one from all of them, or names the best.

    If it does not, because of the budget or since its text states no answer or index, the vote of the n decides.
    """
    async for _ in search.complete(*search.spread(params.n)):
        pass
    solutions = list_finished(search.root.walk())
    if params.judge == "verifier":
        await search.score(solutions)
        solutions.sort(key=lambda node: -1.0 if node.score is None else node.score, reverse=True)
    sampled = list(search.root.walk())
    chosen = await merge(search, solutions, params)
    if chosen is not None:
        return Choice(chosen)
    candidates = search.candidates()
    return await choose_by_majority(search, candidates, dict.fromkeys(candidates, 1.0), sampled)


async def merge(search: Search, solutions: list[Node], params: Synthesize) -> Node | None:
    """Return the solution that a model writes or names; ``None`` if it does neither."""
    is_writing = params.mode == "write"
    chosen, shown = None, list[Node]()
    if len(solutions) > 1:
        report = await write_report(search, solutions, params) if params.judge == "report" else ""
        name: PromptName = "aggregate" if is_writing else "select"
        node, shown = await _ask(search, solutions, name, params, model=params.written_by, report=report)
        if node is not None and is_writing:
            have_answers = any(other.answer is not None for other in shown)
            chosen = node if node.answer is not None or (node.reason == "stop" and not have_answers) else None
        elif node is not None:
            chosen = find_named(read_answer(node), shown)
    data = {"mode": params.mode, "shown": [node.id for node in shown], "chosen": chosen and chosen.id}
    await search.record_decision("synthesis", data)
    return chosen


async def write_report(search: Search, solutions: list[Node], params: Synthesize) -> str:
    """Return a model's comparison of the solutions; empty if the budget ends before it is written."""
    node, _ = await _ask(search, solutions, "report", params, model=params.judged_by)
    return "" if node is None else read_answer(node).strip()


async def _ask(
    search: Search, solutions: list[Node], name: PromptName, params: Synthesize, *, model: str | None, report: str = ""
) -> tuple[Node | None, list[Node]]:
    """Show solutions to a model, and to the next one while its server is away. Return its text, and what it was shown.

    The text is ``None`` if the budget, or the context of each model, has no room for it.
    """
    order = range(len(search.policies))
    shown: list[Node] = []
    for policy in sorted(order, key=lambda index: (search.policies[index].model.id != model, index)):
        if await search.find_absence(policy, name) is not None:
            continue
        is_report = name == "report"
        prompt = MergingPrompt(
            search,
            name,
            None if is_report else params.template,
            is_solution=name == "aggregate",
            policy=policy,
            report=report,
        )
        started = await prompt.start(search.root, solutions)
        if started is None:
            continue
        conversation, shown = started
        async for [node] in search.complete([conversation], 1):
            if node.refusal is None or node.refusal.kind != "away":
                return node, shown
        if search.is_budget_exhausted:
            break
    return None, shown


def find_named(text: str, shown: list[Node]) -> Node | None:
    """Return the solution that a text names last; ``None`` if it names none, or a number that no solution has."""
    numbers = [int(number) for number in _JUDGMENT.findall(text)]
    return shown[numbers[-1] - 1] if numbers and 1 <= numbers[-1] <= len(shown) else None


STRATEGY = Strategy(
    "synthesize",
    Synthesize,
    run,
    lambda params: VerifierUse.SCORES if params.judge == "verifier" else VerifierUse.NONE,
    decided_by=DecidedBy.VOTE,
    supports={Feature.CONSTRAINT, Feature.SEVERAL_MODELS},
)
