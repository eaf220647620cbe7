"""Early exit: ask each thought for its answer at intervals, and end it when its last probes agree.

Source: Fu et al. 2025, "Reasoning Without Self-Doubt: More Efficient Chain-of-Thought Through Certainty Probing"
(Dynasor), section 3. A probe closes the thought, requests the answer, and is sampled on the cached prefix, so
that it costs its own tokens alone; the thought then goes on as if it had not been asked. The job ends when the answers
of the branches that have ended decide the vote (``num_needed_by_beta``), and the others are cancelled. A branch whose
thought reaches its limit before its probes agree has an uncertain answer, which votes only if no other answer does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated

from pydantic import Field

from engine.protocol.types import Capability
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.spec import AnswerSpec
from reasoner.answers.votes import group_equivalent
from reasoner.confidence.stopping_rules import num_needed_by_beta
from reasoner.search.branch_text import BranchText, StreamMonitor
from reasoner.search.candidates import select_candidates
from reasoner.search.search import Search
from reasoner.search.stream import Stream
from reasoner.strategies.base import Choice, DecidedBy, Feature, Params, Samples, Strategy, choose_by_majority
from reasoner.tree import Node, Reason

MONITOR_INTERVAL = 16
"""Interval in tokens at which a probe is checked for its answer."""


class EarlyExit(Params):
    n: Samples = 8
    every: Annotated[int, Field(ge=8, le=65_536, description="Tokens of a thought between two probes.")] = 256
    window: Annotated[int, Field(ge=2, le=16, description="Probes in a row that agree before a thought ends.")] = 2
    final: Annotated[
        str, Field(min_length=1, max_length=500, description="What asks for the answer behind the closed thought.")
    ] = "\n\nFinal answer: \\boxed{"
    answer: Annotated[int, Field(ge=1, le=4096, description="Tokens of a probe's answer at most.")] = 64
    threshold: Annotated[
        float, Field(gt=0.5, le=1, description="How sure the vote must be to stay as it is, for the job to end.")
    ] = 0.95


class Phase(Enum):
    """Phase of a chain: the kind of text that its branch in flight generates."""

    THINKING = auto()
    PROBE = auto()
    ANSWER = auto()


@dataclass(slots=True)
class Chain:
    phase: Phase = Phase.THINKING
    thought: Node | None = None
    """Last node of the thought."""
    probes: list[Node] = field(default_factory=list)
    leaf: Node | None = None
    """End of the chain, once it has ended."""
    is_uncertain: bool = False
    """True if the chain ended without an end of its thought and without probes that agree."""


async def run(search: Search, params: EarlyExit) -> Choice:
    """Probe each thought for its answer at intervals; thoughts end when probes agree, the job when the branches do."""
    async with search.stream() as stream:
        probing = _Probing(search, params, stream)
        probing.think(search.root, params.n)
        async for nodes in stream:
            for node in nodes:
                await probing.advance(node)
            if await probing.is_decided():
                break
    candidates = select_candidates(probing.certain_leaves(), search.spec)
    candidates = candidates or select_candidates(probing.leaves() or search.root.walk(), search.spec)
    return await choose_by_majority(search, candidates, dict.fromkeys(candidates, 1.0), probing.leaves())


class _Probing:
    """The chains of one search, by the index of their first node. Each has one branch in flight."""

    def __init__(self, search: Search, params: EarlyExit, stream: Stream) -> None:
        self._search = search
        self._params = params
        self._stream = stream
        self._chains: dict[int, Chain] = defaultdict(Chain)
        form = AnswerSpec(extract="boxed") if "\\boxed{" in params.final else search.spec.answer
        self._finder = AnswerFinder(form, search.ledger.seconds_until_cut)

    def think(self, parent: Node, n: int = 1) -> None:
        self._stream.complete([parent], n, limit=self._params.every, ends_with_thought=True)

    def leaves(self) -> list[Node]:
        """Return the ends of the chains that have ended."""
        return [chain.leaf for chain in self._chains.values() if chain.leaf is not None]

    def certain_leaves(self) -> list[Node]:
        """Return the ends of the chains whose answers are not uncertain."""
        return [chain.leaf for chain in self._chains.values() if chain.leaf is not None and not chain.is_uncertain]

    async def advance(self, node: Node) -> None:
        """Continue the chain of a node that has arrived: probe its thought, go on with it, or end it."""
        chain = self._chains[node.path[0]]
        match chain.phase:
            case Phase.THINKING if node.reason == "step":
                chain.phase, chain.is_uncertain = Phase.ANSWER, _is_forced(node)
                self._stream.complete([node], 1)
            case Phase.THINKING if node.reason in ("length", "repetition") and node.answer is None:
                chain.phase, chain.thought = Phase.PROBE, node
                await self._probe(node)
            case Phase.PROBE:
                chain.probes.append(node)
                thought = chain.thought
                assert thought is not None
                if await self._agree(chain):
                    chain.leaf = node
                elif thought.reason == "repetition" or not self._has_room(thought):
                    chain.leaf, chain.is_uncertain = node, True
                else:
                    chain.phase = Phase.THINKING
                    self.think(thought)
            case _:
                chain.leaf = node

    async def is_decided(self) -> bool:
        """Return True if the chains that have ended decide the vote. Only certain strict answers count."""
        ended = {index: chain.leaf for index, chain in self._chains.items() if chain.leaf is not None}
        strict = [node for node in self.certain_leaves() if node.answer_level == "strict"]
        groups = await group_equivalent(strict, self._search.spec.answer, self._search.equivalence)
        classes = {node: number for number, group in enumerate(groups) for node in group}
        received = {index: classes.get(node) for index, node in ended.items()}
        sure = self._search.spec.confidence
        threshold = self._params.threshold if sure is None else sure
        return num_needed_by_beta(received, self._params.n, threshold) <= len(received)

    async def _probe(self, node: Node) -> None:
        thoughts = self._search.thoughts
        closing = "" if thoughts is None or node.thought == "closed" else thoughts.forced.rstrip("\n")
        request = await self._search.append_text(node, closing + self._params.final)
        monitor = StreamMonitor(MONITOR_INTERVAL, self._stop_at_answer)
        self._stream.complete([request], 1, limit=self._params.answer, monitor=monitor)

    async def _agree(self, chain: Chain) -> bool:
        """Return True if the last probes state equivalent answers."""
        last = chain.probes[-self._params.window :]
        if len(last) < self._params.window or any(node.answer is None for node in last):
            return False
        return len(await group_equivalent(last, self._search.spec.answer, self._search.equivalence)) == 1

    def _has_room(self, node: Node) -> bool:
        return self._search.max_new_tokens(node) > 0

    async def _stop_at_answer(self, branch: BranchText) -> Reason | None:
        answer = await self._finder.find(branch.parent.text + branch.text, "inside")
        return None if answer is None else "answer"


def _is_forced(node: Node) -> bool:
    """Return True if the limit of thoughts has closed the thought of a node."""
    return any((part.kind, part.origin) == ("thought", "injected") for part in node.parts)


STRATEGY = Strategy(
    "early_exit",
    EarlyExit,
    run,
    decided_by=DecidedBy.VOTE,
    requires={Capability.CONTINUATION},
    supports={Feature.EARLY_STOP},
)
