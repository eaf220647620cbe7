"""What a strategy holds: it grows, scores, prunes and answers, and everything else happens here.

A strategy is a sequential coroutine. It asks ``Search`` for continuations and scores, and for each answer of the engine
``Search`` holds the budget, writes the journal before the strategy sees it, keeps the bill and the tree, and reacts to
cancellation. After a crash the same strategy runs again: answers that the journal holds come back at once, in the order
and the batches in which they first came, so the strategy decides as it did and goes on where it was.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.types import EngineClient, InvalidRequest, ModelInfo, SamplingParams
from prm.aggregate import aggregate
from prm.scorer import StepScorer
from reasoner.answers import extract_answer
from reasoner.budget import Ledger
from reasoner.growth import Arrival, Grower, Growth
from reasoner.jobs import JobSpec, Usage
from reasoner.journal import JobCancelled, Journal
from reasoner.lease import CacheLease
from reasoner.record import LOST, Answer, Record
from reasoner.scoring import BudgetedScorer
from reasoner.tree import Node, Reason

STEP_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class Models:
    """What a search runs on. ``scorer`` is ``None`` for strategies that need no verifier."""

    engine: EngineClient
    policy: ModelInfo
    scorer: StepScorer | None
    lease: CacheLease


class Search:
    """One job's search. Make it with ``Search.begin`` and end it with ``close``; ``root`` is the question."""

    def __init__(
        self,
        spec: JobSpec,
        models: Models,
        ledger: Ledger,
        record: Record,
        scorer: BudgetedScorer | None,
        prompt: tuple[int, ...],
        cancelled: asyncio.Event,
    ) -> None:
        if spec.seed is None:
            raise ValueError("a search needs a seed: draw one when the job is accepted")
        self.spec = spec
        self.ledger = ledger
        self.root = Node(path=(), parent=None, prefix=prompt)
        self.cut_short = False
        """Whether the budget kept the search from something that the strategy asked for."""
        self._seed = spec.seed
        self._models = models
        self._record = record
        self._scorer = scorer
        self._cancelled = cancelled
        self._longest: dict[str, int] = {}
        self._growers: dict[Grower, dict[str, Growth]] = {}

    @classmethod
    async def begin(cls, spec: JobSpec, models: Models, journal: Journal, cancelled: asyncio.Event) -> Search:
        """Tokenises the question and loads what earlier attempts left in the journal."""
        conversation = spec.conversation()
        prompt = await models.engine.tokenize(models.policy.id, conversation)
        if len(prompt) >= models.policy.context:
            raise InvalidRequest(
                f"the problem has {len(prompt)} tokens, and the context of model {models.policy.id!r} holds "
                f"{models.policy.context}: shorten it so that room is left for an answer",
                "problem",
            )
        ledger = Ledger(spec.budget)
        scorer = None
        if models.scorer is not None:
            scorer = BudgetedScorer(models.scorer, ledger, await models.scorer.prompt(conversation))
        record = Record(journal, ledger, await journal.load())
        return cls(spec, models, ledger, record, scorer, prompt, cancelled)

    # What a strategy asks for.

    def expand(self, parents: Sequence[Node], n: int | Sequence[int]) -> AsyncIterator[list[Node]]:
        """Continues each parent by one step, ``n`` times (or ``n[i]`` times parent ``i``).

        Yields new nodes as they arrive, all that are ready at once, and ends when every branch has, or when the budget
        is used up: branches that never started are then missing, and one that was cut says ``budget``.
        """
        return self._grow("expand", parents, n, stop=(STEP_SEPARATOR,), greedy=False)

    def complete(
        self, parents: Sequence[Node], n: int | Sequence[int], *, greedy: bool = False
    ) -> AsyncIterator[list[Node]]:
        """Like ``expand``, to the end of the solution. ``greedy`` takes the likeliest token each time."""
        return self._grow("complete", parents, n, stop=(), greedy=greedy)

    async def score(self, nodes: Sequence[Node]) -> None:
        """Gives nodes their verifier score, forwarding only what is new to the verifier.

        Nodes without a complete step of their own, and those that the budget does not reach, keep ``score = None``.
        """
        if self._scorer is None:
            raise ValueError("this search has no verifier")
        todo = [node for node in nodes if node.score is None and self._scorer.unscored_steps(node)]
        while todo:
            landed = await self._score_batch(todo)
            if not landed:
                self.cut_short = True
                return
            todo = [node for node in todo if node.score is None]

    async def prune(self, nodes: Sequence[Node]) -> None:
        """Gives branches up: they are marked, and their tokens count as wasted."""
        live = [node for node in nodes if node.reason != "pruned"]
        if not live:
            return
        for node in live:
            node.reason = "pruned"
        if not self._record.replaying:
            self._models.lease.prune([node.prefix for node in live])
        ids = [node.id for node in live]
        spend = Usage(pruned=sum(node.tokens for node in live))
        await self._record.note(f"prune:{ids[0]}", "prune", {"nodes": ids}, spend)

    async def select(self, node: Node | None) -> None:
        """Records the chosen leaf; the last thing that a search does."""
        await self._record.note("select", "select", {"node": None if node is None else node.id}, Usage())

    def candidates(self) -> list[Node]:
        """All nodes that state an answer, in the order of their paths."""
        return sorted((node for node in self.root.walk() if node.answer is not None), key=lambda node: node.path)

    async def close(self) -> None:
        """Aborts what is still in flight. Its tokens are on the bill, but a replay does not get them back: they came
        while the strategy was waiting for something else."""
        for grower in list(self._growers):
            del self._growers[grower]
            arrivals = await grower.stop(final=True)
            await self._record.write([self._lost(arrival) for arrival in arrivals])

    # Growing.

    async def _grow(
        self, op: str, parents: Sequence[Node], n: int | Sequence[int], *, stop: tuple[str, ...], greedy: bool
    ) -> AsyncIterator[list[Node]]:
        counts = [n] * len(parents) if isinstance(n, int) else n
        wanted: dict[str, Growth] = {}
        for parent, count in zip(parents, counts, strict=True):
            for growth in self._growths(op, parent, count):
                wanted[growth.key] = growth
        asked = self.spec.sampling
        sampling = SamplingParams(
            temperature=0.0 if greedy else asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            stop=stop,
        )
        models, longest = self._models, self._longest.get(op)
        lease = models.lease.name
        grower = Grower(models.engine, models.policy, self.ledger, self._seed, sampling, longest, lease)
        self._growers[grower] = wanted
        try:
            while wanted:
                landed = await self._next_batch(grower, wanted)
                if not landed:
                    self.cut_short = True
                    break
                ready = [node for growth, data in landed if (node := self._land(growth, data, wanted)) is not None]
                if ready:
                    grower.expected = max(grower.expected or 0, *(node.tokens for node in ready), 1)
                    self._longest[op] = grower.expected
                    yield ready
        except (GeneratorExit, JobCancelled):  # the strategy has heard enough, or nobody wants to hear more
            await self._stop(grower, final=True)
            raise
        except BaseException:  # the engine is gone or this attempt is: the next one goes on from the parts
            await self._stop(grower, final=False)
            raise
        self._growers.pop(grower, None)

    def _growths(self, op: str, parent: Node, count: int) -> list[Growth]:
        room = self._models.policy.context - len(parent.prefix)
        if self.spec.sampling.max_tokens is not None:
            room = min(room, self.spec.sampling.max_tokens - parent.depth_tokens)
        if room <= 0:
            return []
        first = parent.created
        parent.created += count
        return [Growth(op, parent, (*parent.path, index), room) for index in range(first, first + count)]

    async def _next_batch(self, grower: Grower, wanted: dict[str, Growth]) -> list[tuple[Growth, dict[str, Any]]]:
        """The next parts of branches, from the journal or from the engine; nothing when this call is at its end."""
        if self._record.replaying:
            entries = self._record.replay(wanted)
        else:
            grower.start(wanted.values())
            arrivals = await grower.arrivals(self._cancelled)
            if not arrivals:
                arrivals = grower.cut(wanted.values())
            entries = await self._record.write([self._answer(arrival) for arrival in arrivals])
        return [(wanted[entry.key], entry.data) for entry in entries]

    def _answer(self, arrival: Arrival) -> Answer:
        growth = arrival.growth
        reason, stated = arrival.reason, None
        if reason is not None:
            stated = extract_answer(growth.parent.solution + growth.text + arrival.text)
            if stated is not None and reason == "step":
                reason = "answer"
        data = {
            "node": ".".join(map(str, growth.path)),
            "parent": growth.parent.id,
            "part": growth.part,
            "text": arrival.text,
            "token_ids": list(arrival.token_ids),
            "tokens": len(arrival.token_ids),
            "cached": arrival.spend.cached,
            "logprob": arrival.logprob,
            "final": reason is not None,
            "reason": reason,
            "answer": stated,
        }
        return Answer(growth.key, "node", data, arrival.spend, arrival.promise)

    @staticmethod
    def _lost(arrival: Arrival) -> Answer:
        data = {"node": ".".join(map(str, arrival.growth.path)), "tokens": len(arrival.token_ids)}
        return Answer(f"lost:{uuid.uuid4().hex}", LOST, data, arrival.spend, arrival.promise)

    def _land(self, growth: Growth, data: dict[str, Any], wanted: dict[str, Growth]) -> Node | None:
        """Applies a part to its branch; answers the node once the branch has ended."""
        del wanted[growth.key]
        growth.token_ids += tuple(data["token_ids"])
        growth.text += data["text"]
        growth.logprob += data["logprob"]
        growth.part += 1
        reason: Reason | None = data["reason"]
        if reason is None:
            wanted[growth.key] = growth
            return None
        self.cut_short |= reason in ("budget", "timeout")
        node = Node(
            path=growth.path,
            parent=growth.parent,
            prefix=growth.parent.prefix + growth.token_ids,
            text=growth.text,
            tokens=len(growth.token_ids),
            logprob=growth.logprob,
            reason=reason,
            answer=data["answer"],
        )
        growth.parent.children.append(node)
        return node

    async def _stop(self, grower: Grower, *, final: bool) -> None:
        """Ends a call to ``_grow`` before its branches have: what they got is booked, and is in the tree."""
        wanted = self._growers.pop(grower, None)
        if wanted is None:  # ``close`` was here before: it does not wait for iterators that a failure left behind
            return
        entries = self._record.replay(wanted)
        arrivals = await grower.stop(final=final)
        entries += await self._record.write([self._answer(arrival) for arrival in arrivals])
        for entry in entries:
            self._land(wanted[entry.key], entry.data, wanted)

    # Scoring.

    async def _score_batch(self, todo: list[Node]) -> bool:
        """Scores some of the nodes; whether any got a score."""
        assert self._scorer is not None
        by_key = {f"score:{node.id}": node for node in todo}
        if self._record.replaying:
            entries = self._record.replay(by_key)
        else:
            scored = await self._scorer.score(todo)
            answers = []
            for item in scored:
                steps = self._known_scores(item.node) + item.scores
                data = {
                    "node": item.node.id,
                    "scores": list(item.scores),
                    "score": aggregate(steps, self.spec.verifier.aggregation),
                    "computed": item.spend.verifier_computed,
                    "cached": item.spend.verifier_cached,
                }
                answers.append(Answer(f"score:{item.node.id}", "score", data, item.spend, item.promise))
            entries = await self._record.write(answers)
        for entry in entries:
            node = by_key[entry.key]
            node.scores = self._known_scores(node) + tuple(entry.data["scores"])
            node.score = entry.data["score"]
        return bool(entries)

    @staticmethod
    def _known_scores(node: Node) -> tuple[float, ...]:
        ancestor = node.parent
        while ancestor is not None and not ancestor.scores:
            ancestor = ancestor.parent
        return () if ancestor is None else ancestor.scores
