"""Budget forcing: decide how long a model thinks. A thinking that takes too long is ended and its answer asked for; one
that ends too soon is told to wait.

Source: Muennighoff et al. 2025, "s1: Simple test-time scaling", section 3.1. A model that has no sign for the end of
its thinking ends it with its text. Without a cap a thinking may take all that leaves room for the answer: in the
context, and in the budget, so that a budget that binds still ends with an answer.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from pydantic import Field

from reasoner.answers.equivalence import Equivalence
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.spec import AnswerSpec
from reasoner.budget.spec import MAX_BUDGET_TOKENS
from reasoner.search.branch import PartialBranch, Watch
from reasoner.search.search import Search
from reasoner.strategies.base import Choice, Params, Samples, Strategy, choose_by_majority
from reasoner.tree import Node, Reason

DEFAULT_MARKER = "</think>"
WATCH_INTERVAL = 16
"""Tokens after which it is looked whether the answer that was asked for is there."""


class BudgetForcing(Params):
    n: Samples = 1
    thinking: Annotated[
        int | None, Field(ge=0, le=MAX_BUDGET_TOKENS, description="Tokens of thinking at most; default: what there is.")
    ] = None
    extensions: Annotated[int, Field(ge=0, le=32, description="How often an end of thinking is taken back.")] = 0
    marker: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=64,
            description=f"End of the thinking; default: {DEFAULT_MARKER} if the model knows it, else the end of "
            "the text.",
        ),
    ] = None
    wait: Annotated[str, Field(min_length=1, max_length=500, description="What takes the place of an end.")] = "Wait"
    final: Annotated[str, Field(min_length=1, max_length=500, description="What asks for the answer.")] = (
        "\n\nFinal answer: \\boxed{"
    )
    answer: Annotated[int, Field(ge=1, le=4096, description="Tokens that are kept for the answer.")] = 64


async def run(search: Search, params: BudgetForcing, equivalence: Equivalence) -> Choice:
    """Ends a thinking at its cap and asks for the answer, or takes its end back some times; several chains vote."""
    marker = params.marker
    if marker is None and len(await search.tokenize(DEFAULT_MARKER)) == 1:
        marker = DEFAULT_MARKER
    cap = await _max_thinking_tokens(search, params, marker)
    extended, ends = Counter[int](), dict[int, Node]()
    # Where the request opens a box, nothing short of its end is an answer.
    form = AnswerSpec(extract="boxed") if "\\boxed{" in params.final else search.spec.answer
    stated = AnswerFinder(form, search.ledger.seconds_until_cut)
    writing: set[Node] = set()
    """Nodes whose continuation is the answer."""
    async with search.stream() as stream:

        async def ask(node: Node) -> None:
            asked = await search.append_text(node, params.final if marker is None else marker + params.final)
            writing.add(asked)
            stream.complete([asked], 1, limit=params.answer, watch=Watch(WATCH_INTERVAL, answered))

        async def answered(seen: PartialBranch) -> Reason | None:
            told = seen.parent.text + seen.text
            return None if await stated.find(told, "inside") is None else "answer"

        if cap > 0:
            stream.complete([search.root], params.n, until=marker, limit=cap)
        else:
            for _ in range(params.n):
                await ask(search.root)
        async for nodes in stream:
            for node in nodes:
                chain = node.path[0]
                ends[chain] = node
                if node.parent in writing:
                    continue
                marked = marker is not None and node.text.endswith(marker)
                ended = marked or node.reason == "stop"
                if ended and extended[chain] < params.extensions and node.depth_tokens < cap:
                    extended[chain] += 1
                    waiting = await search.append_text(node, params.wait, instead=marker or "")
                    stream.complete([waiting], 1, until=marker, limit=cap - node.depth_tokens)
                elif marked:
                    writing.add(node)
                    stream.complete([node], 1)
                elif node.reason in ("length", "repetition") or (ended and node.answer is None):
                    await ask(node)
    answers = [node for _, node in sorted(ends.items()) if node.answer is not None]
    choice = await choose_by_majority(search, answers, dict.fromkeys(answers, 1.0), equivalence)
    return choice if params.n > 1 else Choice(choice.node)


async def _max_thinking_tokens(search: Search, params: BudgetForcing, marker: str | None) -> int:
    """Tokens that a chain may think, so that what is said to it and its answer still fit."""
    said = len(await search.tokenize((marker or "") + params.final))
    said += params.extensions * len(await search.tokenize(params.wait))
    rooms = [search.max_new_tokens(search.root) - said]
    if search.spec.budget.tokens is not None:
        rooms.append(search.spec.budget.tokens // params.n)
    if params.thinking is not None:
        rooms.append(params.thinking + params.answer)
    return max(0, min(rooms) - params.answer)


STRATEGY = Strategy("budget_forcing", BudgetForcing, run, needs_verifier=False, votes=True)
