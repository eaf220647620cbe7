"""What a strategy holds: it grows, scores, prunes and answers, and everything else happens here.

A strategy is a sequential coroutine. It asks ``Search`` for continuations and scores, and for each answer of the engine
``Search`` holds the budget, writes the journal before the strategy sees it, keeps the bill and the tree, and reacts to
cancellation. After a crash the same strategy runs again: answers that the journal holds come back at once, in the order
and the batches in which they first came, so the strategy decides as it did and goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from engine.protocol.types import EngineClient, InvalidRequest, ModelInfo
from reasoner.answers.canonical import canonicalize
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.budget.allocator import MAX_TRUST, RULE_KINDS, JobProgress, TokenRequest
from reasoner.budget.ledger import Ledger
from reasoner.budget.usage import Usage
from reasoner.confidence.calibration import Calibration
from reasoner.jobs.journal import Journal
from reasoner.jobs.spec import JobSpec
from reasoner.search.cache_lease import CacheLease
from reasoner.search.grants import Grants
from reasoner.search.replay import Answer, Record
from reasoner.search.scoring import NodeScorer, known_steps
from reasoner.search.stream import Shared, Stream
from reasoner.tree import Node, find_best_leaf


@dataclass(frozen=True, slots=True)
class SearchContext:
    """The job that a search runs for, and everything that it runs on."""

    spec: JobSpec
    engine: EngineClient
    policy: ModelInfo
    """The model that writes the solutions."""
    lease: CacheLease
    journal: Journal
    ledger: Ledger
    equivalence: Equivalence
    """Compares answers within the job's time."""
    cancelled: asyncio.Event
    scorer: NodeScorer | None = None
    """The job's verifier, if the strategy uses one."""
    calibration: Calibration | None = None
    """Calibration table that holds for the job's models, if there is one."""


class Search:
    """One job's search. Make it with ``Search.begin`` and end it with ``close``; ``root`` is the question."""

    def __init__(self, context: SearchContext, record: Record, prompt: tuple[int, ...]) -> None:
        spec = context.spec
        if spec.seed is None:
            raise ValueError("a search needs a seed: choose one when the job is accepted")
        self.spec = spec
        self.ledger = context.ledger
        self.root = Node(path=(), parent=None, prefix=prompt)
        self.calibration = context.calibration
        self.equivalence = context.equivalence
        self._engine = context.engine
        self._policy = context.policy
        self._lease = context.lease
        self._record = record
        self._scorer = context.scorer
        self._verdicts: dict[tuple[tuple[int, ...], str], tuple[int, tuple[float, ...], float]] = {}
        """By what was scored: how many steps above it had scores, those of its own, and its score."""
        self._shared = Shared(
            spec,
            spec.seed,
            context.engine,
            context.policy,
            context.lease.name,
            context.ledger,
            record,
            context.cancelled,
            AnswerFinder(spec.answer, context.ledger.seconds_until_cut),
            self.root,
        )
        self._shared.finish_one = self._finish_one
        self._shared.keep()
        if context.journal.grant_source is not None:
            self._shared.grants = Grants(context.journal.grant_source, context.ledger, record, self._ask)

    @classmethod
    async def begin(cls, context: SearchContext, prompt: tuple[int, ...]) -> Search:
        """Load what earlier attempts left in the journal. ``prompt``: the question (``tokenize_problem``)."""
        record = Record(context.journal, context.ledger, await context.journal.load())
        search = cls(context, record, prompt)
        await search._shared.answers.check()
        return search

    # What a strategy asks for.

    @property
    def cut_short(self) -> bool:
        """Whether the budget kept the search from something that the strategy asked for."""
        return self._shared.cut_short

    def stream(self) -> Stream:
        """For a strategy that adds work while it listens; see ``Stream``."""
        return Stream(self._shared)

    async def expand(
        self, parents: Sequence[Node], n: int | Sequence[int], *, greedy: bool = False
    ) -> AsyncIterator[list[Node]]:
        """One ``Stream.expand``: yields its nodes as they arrive."""
        async with self.stream() as stream:
            stream.expand(parents, n, greedy=greedy)
            async for nodes in stream:
                yield nodes

    async def complete(
        self, parents: Sequence[Node], n: int | Sequence[int], *, greedy: bool = False
    ) -> AsyncIterator[list[Node]]:
        """One ``Stream.complete``: yields its nodes as they arrive."""
        async with self.stream() as stream:
            stream.complete(parents, n, greedy=greedy)
            async for nodes in stream:
                yield nodes

    async def say(self, parent: Node, text: str, *, instead: str = "") -> Node:
        """A child whose text the search itself adds, so that a branch goes on from there.

        It takes the place of an end of sequence, and of ``instead`` if the parent's own text ends with that. Nothing is
        generated. A child that leaves no room for a token has ended, by ``context``.
        """
        prefix = parent.prefix[:-1] if parent.closed else parent.prefix
        undone = len(instead) if instead and parent.text.endswith(instead) else 0
        if undone:
            tokens = await self.tokenize(instead)
            if prefix[-len(tokens) :] == tokens:
                prefix = prefix[: -len(tokens)]
            else:  # its tokens hold other text as well
                above = () if parent.parent is None else parent.parent.prefix
                prefix = above + await self.tokenize(parent.text[:-undone])
        prefix += await self.tokenize(text)
        return await self._said(Node(self._next_path(parent), parent, prefix, text, undone=undone))

    async def ask(self, parent: Node, messages: Sequence[dict[str, str]]) -> Node:
        """A child that begins a conversation of its own, with these messages; its text is the last one's."""
        prefix = await self.tokenize(messages)
        text = messages[-1]["content"]
        return await self._said(Node(self._next_path(parent), parent, prefix, text, fresh=True))

    def room(self, node: Node) -> int:
        """Tokens that a continuation of this node may have: what the context and the job's own limit leave."""
        return self._shared.room(node)

    @property
    def context(self) -> int:
        """Tokens that the policy's context holds."""
        return self._policy.context

    async def tokenize(self, text: str | Sequence[dict[str, str]]) -> tuple[int, ...]:
        """The policy's tokens of a plain text, or of a conversation with what prompts the next turn. They depend on
        nothing else, so no journal keeps them."""
        return await self._engine.tokenize(self._policy.id, text, special=False)

    def rng(self, node: Node, purpose: str = "") -> random.Random:
        """Randomness for a decision: the same for the same job seed, node and purpose, and no other's."""
        return random.Random(f"{self._shared.seed}/{node.id}/{purpose}")

    async def score(self, nodes: Sequence[Node]) -> None:
        """Gives nodes their verifier's score.

        Nodes that it cannot say anything of, and those that the budget does not reach, keep ``score = None``.
        """
        if self._scorer is None:
            raise ValueError("this search has no verifier")
        todo = [node for node in nodes if node.score is None and self._scorer.scorable(node)]
        while todo:
            landed = await self._score_batch(todo)
            if not landed and await self._shared.more(steps=True):
                continue
            if not landed:
                self._shared.cut_short = True
                return
            todo = [node for node in todo if node.score is None and self._scorer.scorable(node)]

    async def prune(self, nodes: Sequence[Node]) -> None:
        """Gives branches up: they are marked, and their tokens count as wasted."""
        live = [node for node in nodes if node.reason != "pruned"]
        if not live:
            return
        for node in live:
            node.reason = "pruned"
        if not self._record.replaying:
            self._lease.prune([node.prefix for node in live])
        ids = [node.id for node in live]
        spend = Usage(pruned=sum(node.tokens for node in live if not node.is_copy))
        await self._record.note(f"prune:{ids[0]}", "prune", {"nodes": ids}, spend)

    async def settle(self, key: str, find: Callable[[], Awaitable[str | None]]) -> str | None:
        """What ``find`` said the first time that this job came to ``key``: for what neither the engine nor the seed
        decides, and another run might decide otherwise."""
        if self._record.replaying:
            found = self._record.replay((key,))
            if not found:
                return await find()
        else:
            value = await find()
            late = {"late": True} if self.ledger.seconds_left() == 0.0 else {}
            found = await self._record.write([Answer(key, "settled", {"value": value} | late, Usage())])
        data = found[0].data
        self._shared.cut_short |= data.get("late", False)
        settled: str | None = data["value"]
        return settled

    @property
    def verifies(self) -> bool:
        """Whether there is a verifier."""
        return self._scorer is not None

    async def decide(self, key: str, data: dict[str, Any]) -> None:
        """Writes a decision where the client and a replay can see it. A replay that decides something else, because it
        is other code or another table, raises ``ReplayMismatch``: what it decided is part of the key."""
        digest = blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=6).hexdigest()
        await self._record.note(f"decide:{key}:{digest}", "decision", data, Usage())

    async def select(self, node: Node | None) -> None:
        """Records the chosen leaf; the last thing that a search does."""
        await self._record.note("select", "select", {"node": None if node is None else node.id}, Usage())

    def candidates(self) -> list[Node]:
        """All nodes that state an answer, in the order of their paths."""
        return sorted((node for node in self.root.walk() if node.answer is not None), key=lambda node: node.path)

    async def solutions(self) -> list[Node]:
        """Return the candidates of a search by steps that has come to its end.

        Where no branch states an answer, the best one goes to its end first: it got no further because the strategy's
        own limits did not.
        """
        if not self.candidates():
            await self._finish_best()
        return self.candidates()

    async def close(self) -> None:
        """Aborts what is still in flight, where a failure left a stream open."""
        for stream in list(self._shared.streams):
            await stream.abandon()

    # The end of a search by steps.

    async def _finish_one(self) -> bool:
        """Finish the best branch out of what was kept for it, since the budget reaches no further and no branch has an
        answer. Return whether something was kept: then there may be some of it left."""
        if not self.ledger.is_setting_aside:
            return False
        await self._finish_best()
        return True

    async def _finish_best(self) -> None:
        """Take the best branch that can go on to its end, greedily. From then on nothing is kept for that."""
        self.ledger.release_set_aside()
        ends = [node for node in self.root.walk() if node.open and not any(child.open for child in node.children)]
        best = find_best_leaf([node for node in ends if self.room(node) > 0])
        if best is None:
            return
        async for nodes in self.complete([best], 1, greedy=True):
            if self._scorer is not None:
                await self.score(nodes)

    # Text that is not generated.

    @staticmethod
    def _next_path(parent: Node) -> tuple[int, ...]:
        parent.created += 1
        return (*parent.path, parent.created - 1)

    async def _said(self, node: Node) -> Node:
        assert node.parent is not None
        node.reason = "context" if len(node.prefix) >= self.context else "said"
        node.parent.children.append(node)
        data = {
            "node": node.id,
            "parent": node.parent.id,
            "part": 0,
            "text": node.text,
            "token_ids": [],
            "tokens": 0,
            "cached": 0,
            "logprob": 0.0,
            "final": True,
            "reason": node.reason,
            "answer": None,
            "fresh": node.fresh,
            "undone": node.undone,
        }
        await self._record.note(f"say:{node.id}", "node", data, Usage())
        return node

    def _ask(self) -> TokenRequest:
        """What a job that shares a budget asks for: by the solutions that have ended."""
        compare = self.spec.answer.compare
        samples = [
            (None if leaf.answer is None else canonicalize(leaf.answer, compare), leaf.score)
            for leaf in self.root.walk()
            if leaf.parent is not None and not leaf.open and leaf.reason != "pruned"
        ]
        verifier = self.spec.verifier
        trust = 1.0 if verifier is not None and verifier.kind in RULE_KINDS else MAX_TRUST
        return JobProgress(samples, self.ledger.usage.total, trust).next_request()

    # Scoring.

    async def _score_batch(self, todo: list[Node]) -> bool:
        """Scores some of the nodes; whether any got a score."""
        assert self._scorer is not None
        by_key = {f"score:{node.id}": node for node in todo}
        if self._record.replaying:
            entries = self._record.replay(by_key)
        elif repeats := [repeat for node in todo if (repeat := self._repeat(node)) is not None]:
            entries = await self._record.write(repeats)
        else:
            answers = []
            # A node whose ancestor is here too comes after it, and adds to what that one's score covers. So does one
            # that says the same as another: it gets that one's score.
            here = set(todo)
            alone = set({_saying(node): node for node in reversed(todo)}.values())
            ready = [node for node in todo if node in alone and here.isdisjoint(node.lineage()[:-1])]
            for item in await self._scorer.score(ready):
                data = {
                    "node": item.node.id,
                    "scores": list(item.steps),
                    "score": item.score,
                    "computed": item.spend.verifier_computed,
                    "cached": item.spend.verifier_cached,
                }
                answers.append(Answer(f"score:{item.node.id}", "score", data, item.spend, item.promise))
            entries = await self._record.write(answers)
        for entry in entries:
            node, steps = by_key[entry.key], tuple(entry.data["scores"])
            self._verdicts.setdefault(_saying(node), (len(known_steps(node)), steps, entry.data["score"]))
            node.scores = known_steps(node) + steps
            node.score = entry.data["score"]
        return bool(entries)

    def _repeat(self, node: Node) -> Answer | None:
        """The score of a node that says, after the same text, what a scored one says: nothing is computed for it."""
        known, steps, score = self._verdicts.get(_saying(node), (-1, (), 0.0))
        if known != len(known_steps(node)):
            return None
        data = {"node": node.id, "scores": list(steps), "score": score, "computed": 0, "cached": 0}
        return Answer(f"score:{node.id}", "score", data, Usage())


async def tokenize_problem(spec: JobSpec, engine: EngineClient, policy: ModelInfo) -> tuple[int, ...]:
    """Return the prompt that asks the question. Raises ``InvalidRequest`` where it leaves no room for an answer."""
    prompt = await engine.tokenize(policy.id, spec.to_messages())
    if len(prompt) >= policy.context:
        raise InvalidRequest(
            f"the problem has {len(prompt)} tokens, and the context of model {policy.id!r} holds {policy.context}: "
            "shorten it so that room is left for an answer",
            "problem",
        )
    return prompt


def _saying(node: Node) -> tuple[tuple[int, ...], str]:
    """Return what a verdict depends on: all tokens up to the node's end, and its own text."""
    return node.prefix, node.text
