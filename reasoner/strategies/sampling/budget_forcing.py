"""Budget forcing: control how long a model thinks. Thinking that takes too long is ended and the answer requested;
thinking that ends too soon is continued with a word such as "Wait".

Source: Muennighoff et al. 2025, "s1: Simple test-time scaling", section 3.1. A model without an end-of-thinking token
ends its thinking with its text. Without a cap, thinking may use all of the context and the budget except the tokens
kept for the answer, so that an exhausted budget still gives an answer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated

from pydantic import Field

from engine.protocol.types import Capability
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.spec import AnswerSpec
from reasoner.budget.spec import MAX_BUDGET_TOKENS
from reasoner.search.branch_text import BranchText, StreamMonitor
from reasoner.search.candidates import select_candidates
from reasoner.search.search import Search
from reasoner.search.stream import Stream
from reasoner.strategies.base import Choice, DecidedBy, Params, Samples, Strategy, choose_by_majority
from reasoner.tree import Node, Reason

MONITOR_INTERVAL = 16
"""Interval in tokens at which the text is checked for a requested answer."""


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
            description="End of the thinking; default: the model's own, if it has thoughts, else the end of the text.",
        ),
    ] = None
    wait: Annotated[str, Field(min_length=1, max_length=500, description="What takes the place of an end.")] = "Wait"
    final: Annotated[str, Field(min_length=1, max_length=500, description="What asks for the answer.")] = (
        "\n\nFinal answer: \\boxed{"
    )
    answer: Annotated[int, Field(ge=1, le=4096, description="Tokens that are kept for the answer.")] = 64


class Phase(Enum):
    """Phase of a chain: the kind of text that its branch in flight generates."""

    THINKING = auto()
    ANSWER = auto()


@dataclass(slots=True)
class Chain:
    phase: Phase = Phase.THINKING
    extensions: int = 0
    """Number of times that the end of thinking was replaced by a continuation."""
    last: Node | None = None
    """Last generated node."""


async def run(search: Search, params: BudgetForcing) -> Choice:
    """End thinking at its cap and request the answer, or take its end back some times; several chains vote."""
    marker = params.marker
    if marker is None and search.thoughts is not None:
        marker = search.thoughts.closing
    cap = await _max_thinking_tokens(search, params, marker)
    async with search.stream() as stream:
        forcing = _Forcing(search, params, stream=stream, marker=marker, cap=cap)
        await forcing.start()
        async for nodes in stream:
            for node in nodes:
                await forcing.advance(node)
    last = [forcing.chains[index].last for index in sorted(forcing.chains)]
    ends = [node for node in last if node is not None]
    answers = select_candidates(ends, search.spec)
    choice = await choose_by_majority(search, answers, dict.fromkeys(answers, 1.0), ends)
    return choice if params.n > 1 else Choice(choice.node, leaders=choice.leaders)


class _Forcing:
    """The chains of one search, by the index of their first node. Each has one branch in flight."""

    def __init__(self, search: Search, params: BudgetForcing, stream: Stream, marker: str | None, cap: int) -> None:
        self.chains: dict[int, Chain] = defaultdict(Chain)
        self._search = search
        self._params = params
        self._stream = stream
        self._marker = marker
        self._cap = cap
        # If the request opens a box, the answer is complete only when the box is closed.
        form = AnswerSpec(extract="boxed") if "\\boxed{" in params.final else search.spec.answer
        self._finder = AnswerFinder(form, search.ledger.seconds_until_cut)

    async def start(self) -> None:
        if self._cap > 0:
            self._think(self._search.root, self._params.n, self._cap)
            return
        for _ in range(self._params.n):
            await self._request_answer(self._search.root)

    async def advance(self, node: Node) -> None:
        """Continue the chain of a node that has arrived: extend its thinking, request the answer, or end it."""
        chain = self.chains[node.path[0]]
        chain.last = node
        if chain.phase is Phase.ANSWER:
            return
        has_marker = node.reason == "step"
        has_ended = has_marker or node.reason == "stop"
        if has_ended and chain.extensions < self._params.extensions and node.depth_tokens < self._cap:
            chain.extensions += 1
            waiting = await self._search.append_text(node, self._params.wait, instead=self._marker or "")
            self._think(waiting, 1, self._cap - node.depth_tokens)
        elif has_marker:
            chain.phase = Phase.ANSWER
            self._stream.complete([node], 1)
        elif node.reason in ("length", "repetition") or (has_ended and node.answer_level != "strict"):
            await self._request_answer(node)

    def _think(self, parent: Node, n: int, limit: int) -> None:
        until = self._params.marker
        self._stream.complete([parent], n, until=until, limit=limit, ends_with_thought=until is None)

    async def _request_answer(self, node: Node) -> None:
        request = await self._search.append_text(node, (self._marker or "") + self._params.final)
        self.chains[request.path[0]].phase = Phase.ANSWER
        monitor = StreamMonitor(MONITOR_INTERVAL, self._stop_at_answer)
        self._stream.complete([request], 1, limit=self._params.answer, monitor=monitor)

    async def _stop_at_answer(self, branch: BranchText) -> Reason | None:
        answer = await self._finder.find(branch.parent.text + branch.text, "inside")
        return None if answer is None else "answer"


async def _max_thinking_tokens(search: Search, params: BudgetForcing, marker: str | None) -> int:
    """Return the maximum number of thinking tokens of a chain that leaves room for appended texts and the answer."""
    appended = len(await search.tokenize((marker or "") + params.final))
    appended += params.extensions * len(await search.tokenize(params.wait))
    limits = [search.max_new_tokens(search.root) - appended]
    if search.spec.budget.tokens is not None:
        limits.append(search.spec.budget.tokens // params.n)
    if params.thinking is not None:
        limits.append(params.thinking + params.answer)
    return max(0, min(limits) - params.answer)


STRATEGY = Strategy(
    "budget_forcing",
    BudgetForcing,
    run,
    decided_by=DecidedBy.VOTE,
    requires={Capability.CONTINUATION},
    supports=frozenset(),
)
