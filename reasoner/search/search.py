"""The interface that a strategy programs against: expand, complete, score and prune branches.

A strategy is a sequential coroutine. For each answer of the engine or the verifier ``Search`` enforces the budget,
writes the journal before the strategy sees the answer, keeps the bill and the tree, and reacts to cancellation. After a
crash the same strategy runs again: results in the journal are returned at once, in their original order and batches,
so the strategy makes the same decisions and continues from where it was.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from engine.protocol.types import EngineUnavailable, ModelInfo, TokenizeRequest, Tokens
from engine.protocol.wire import write_tokens
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.votes import find_vote_form
from reasoner.budget.allocator import MAX_TRUST, JobProgress, TokenRequest
from reasoner.budget.usage import Usage
from reasoner.deadline import run_unless
from reasoner.jobs.job import TokenProbability
from reasoner.jobs.journal import JobCancelled
from reasoner.search.answer_logprobs import compute_logprobs
from reasoner.search.brought.candidates import add_candidates
from reasoner.search.candidates import list_finished, select_candidates
from reasoner.search.context import SearchContext
from reasoner.search.grants import Grants
from reasoner.search.policies.availability import MEMBERS, describe_absences
from reasoner.search.policies.forced_calls import choose_natively
from reasoner.search.policies.policy import Policy, check_room, count_samples, find_sample_number
from reasoner.search.replay import PendingEntry, ReplayLog
from reasoner.search.score_recorder import ComparisonRecorder, Pair, ScoreRecorder
from reasoner.search.stream import Stream
from reasoner.search.stream_context import StreamContext
from reasoner.thoughts import ThoughtFormat
from reasoner.tree import Node, find_best_leaf


class Search:
    """One job's search. Make it with ``Search.begin`` and end it with ``close``; ``root`` is the question."""

    def __init__(self, context: SearchContext, replay_log: ReplayLog, prompt: Tokens) -> None:
        spec = context.spec
        self._context = context
        self.spec = spec
        self.ledger = context.ledger
        self.root = Node(path=(), parent=None, prefix=prompt)
        self.roots = [self.root]
        """For each policy the node from which it begins solutions; with several they are children of ``root``."""
        self._find_thought(self.root)
        self.calibration = context.calibration
        self.calibration_gap = context.calibration_gap
        self.equivalence = context.equivalence.settled_by(self.record_result)
        self._weights = [policy.weight for policy in context.policies]
        self._replay_log = replay_log
        self._open_streams: set[Stream] = set()
        self._absences: dict[int, str] = {}
        answers = AnswerFinder(spec.answer, context.ledger.seconds_until_cut)
        self._shared = StreamContext(context, spec.seed, replay_log=replay_log, answers=answers, root=self.root)
        self._shared.finish_from_reserve = self._finish_from_reserve
        self._shared.reserve_for_answer()
        if context.journal.grant_source is not None:
            self._shared.grants = Grants(context.journal.grant_source, context.ledger, replay_log, self._next_request)
        self._scores = None if context.scorer is None else ScoreRecorder(context.scorer, replay_log, self._shared)
        self._comparisons = (
            None if context.comparer is None else ComparisonRecorder(context.comparer, replay_log, self._shared)
        )

    @classmethod
    async def begin(cls, context: SearchContext, prompt: Tokens) -> Search:
        """Load the entries of earlier attempts from the journal. ``prompt`` is the question (``tokenize_problem``)."""
        search = cls(context, ReplayLog(context.journal, context.ledger, await context.journal.load()), prompt)
        await search._shared.answers.check()
        if context.left_out:
            await search.record_decision(MEMBERS, {"left_out": list(context.left_out)})
        if len(context.policies) > 1:
            search.roots = await search._start_roots()
        else:
            await search._record_prompt(search.root)
        return search

    async def close(self) -> None:
        """Abort branches that are still in flight if a failure left a stream open."""
        for stream in list(self._open_streams):
            await stream.close(is_final=False)

    # Properties of the search.

    @property
    def is_budget_exhausted(self) -> bool:
        """True if the budget prevented an operation that the strategy requested."""
        return self._shared.is_budget_exhausted

    @property
    def has_verifier(self) -> bool:
        return self._scores is not None

    @property
    def note(self) -> str | None:
        """Sentences on models that were away, and on what the verifier was asked in vain."""
        recorder = self._scores or self._comparisons
        missing = None if recorder is None else recorder.describe_missing()
        absences = describe_absences(self._context.left_out, self.root, self.policies, self._absences)
        return ". ".join(filter(None, (absences, missing))) or None

    @property
    def policies(self) -> Sequence[Policy]:
        """The models that write the solutions, usually one."""
        return self._context.policies

    @property
    def policy(self) -> ModelInfo:
        """The first of them, and the only one for most strategies."""
        return self._context.policies[0].model

    @property
    def can_continue(self) -> bool:
        """True if the policy's server can go on after the beginning of a solution."""
        return self._context.policies[0].can_continue

    @property
    def thoughts(self) -> ThoughtFormat | None:
        """Delimiters at which the search can end the policy's thoughts; ``None`` if there are none."""
        thoughts = self._context.policies[0].thoughts
        return None if thoughts is None or thoughts.is_told else thoughts

    @property
    def context(self) -> int:
        """Number of tokens that the policy's context holds."""
        return self.policy.context

    @property
    def usage_by_model(self) -> Mapping[str, Usage]:
        """The bill so far by model, without the time; only for jobs with several policies."""
        return self._replay_log.usage_by_model if len(self.policies) > 1 else {}

    def max_new_tokens(self, node: Node) -> int:
        """Return the tokens that a continuation of the node may have, by the context and the job's own limit."""
        return self._shared.max_new_tokens(node)

    def rng(self, node: Node, purpose: str = "") -> random.Random:
        """Return a random generator seeded by the job's seed, the node and the purpose alone."""
        return random.Random(f"{self._shared.seed}/{node.id}/{purpose}")

    def spread(self, end: int, start: int = 0) -> tuple[list[Node], list[int]]:
        """Return the nodes at which the samples from ``start`` to ``end`` begin, with the number of each."""
        return self.roots, count_samples(self._weights, start, end)

    def sample_number(self, node: Node) -> int:
        """Return the number of a whole solution among all samples that ``spread`` began."""
        return find_sample_number(self._weights, node.policy, node.path[-1])

    # Branches.

    def stream(self) -> Stream:
        """Return a stream, for a strategy that adds work while it waits for branches."""
        return Stream(self._shared, self._open_streams)

    async def expand(
        self, parents: Sequence[Node], n: int | Sequence[int], *, greedy: bool = False
    ) -> AsyncIterator[list[Node]]:
        """Yield the nodes of one ``Stream.expand`` as they arrive."""
        async with self.stream() as stream:
            stream.expand(parents, n, greedy=greedy)
            async for nodes in stream:
                yield nodes

    async def complete(
        self, parents: Sequence[Node], n: int | Sequence[int], *, greedy: bool = False
    ) -> AsyncIterator[list[Node]]:
        """Yield the nodes of one ``Stream.complete`` as they arrive."""
        async with self.stream() as stream:
            stream.complete(parents, n, greedy=greedy)
            async for nodes in stream:
                yield nodes

    async def score(self, nodes: Sequence[Node]) -> None:
        """Give nodes their verifier's score.

        Nodes that the verifier cannot score, and those that the budget does not reach, keep ``score = None``.
        """
        if self._scores is None:
            raise ValueError("this search has no verifier")
        await self._scores.score(nodes)

    async def compare(self, pairs: Sequence[Pair]) -> dict[Pair, float | None]:
        """Return for each pair the probability that its first solution is better, by the verifier.

        ``None`` stands for a pair on which it gave no verdict. Pairs that the budget does not reach are missing.
        """
        if self._comparisons is None:
            raise ValueError("this search has no verifier that compares")
        return await self._comparisons.compare(pairs)

    async def prune(self, nodes: Sequence[Node]) -> None:
        """Mark branches as pruned; their tokens count as wasted."""
        live = [node for node in nodes if node.reason != "pruned"]
        if not live:
            return
        for node in live:
            node.reason = "pruned"
        if not self._replay_log.is_replaying:
            self._context.prefix_pin.prune([node.prefix for node in live])
        ids = [node.id for node in live]
        spend = Usage(pruned=sum(node.tokens for node in live if not node.is_copy))
        await self._replay_log.record(f"prune:{ids[0]}", "prune", {"nodes": ids}, spend)

    # Text that is not generated.

    async def append_text(self, parent: Node, text: str, *, instead: str = "") -> Node:
        """Add a child with a given text, from which the branch can be continued.

        The text replaces an end-of-sequence token, and ``instead`` if the parent's own text ends with that. A child
        that leaves no room for a token has ended with the reason ``context``.
        """
        prefix = parent.prefix[:-1] if parent.ended_with_eos else parent.prefix
        trimmed = len(instead) if instead and parent.text.endswith(instead) else 0
        if trimmed:
            tokens = await self.tokenize(instead, parent.policy)
            if prefix[-len(tokens) :] == tokens:
                prefix = prefix[: -len(tokens)]
            else:  # its last token holds other text as well
                above = () if parent.parent is None else parent.parent.prefix
                prefix = above + await self.tokenize(parent.text[:-trimmed], parent.policy)
        tokens = await self.tokenize(text, parent.policy)
        node = Node(
            self._next_path(parent),
            parent,
            prefix + tokens,
            text,
            trimmed_chars=trimmed,
            is_solution=parent.is_solution,
        )
        node.policy = parent.policy
        thought = self._shared.find_thinking(parent)
        if thought is not None:
            if trimmed and thought.format.closing in instead:
                thought = replace(thought, state="open")
            thought = thought.inject(text, len(tokens))
            node.thought, node.parts = thought.state, thought.parts
        return await self._add_text_node(node)

    async def start_conversation(
        self, parent: Node, messages: Sequence[dict[str, str]], *, is_solution: bool = True, policy: int | None = None
    ) -> Node:
        """Add a child that begins a conversation of its own with these messages; its text is the last one's.

        Without ``is_solution`` it is about solutions instead of being one, so that no answer is read from it.
        ``policy`` is the index of the policy that goes on; by default the parent's.
        """
        policy = parent.policy if policy is None else policy
        prefix = await self.tokenize(messages, policy, calls=is_solution)
        node = Node(
            self._next_path(parent),
            parent,
            prefix,
            messages[-1]["content"],
            starts_conversation=True,
            is_solution=is_solution,
        )
        node.policy = policy
        self._find_thought(node)
        return await self._add_text_node(node)

    async def tokenize(self, text: str | Sequence[dict[str, Any]], policy: int = 0, *, calls: bool = False) -> Tokens:
        """Return a policy's tokens of a plain text, or of a conversation with the prompt of the next turn.

        ``calls``: the model may call the job's functions in that turn. The tokens depend on nothing else, so they are
        not in the journal.
        """
        context, spec = self._context, self._context.spec
        model = context.policies[policy].model
        variables = spec.template_kwargs | choose_natively(spec, model) if calls else spec.chat_template_kwargs
        return await context.engine.tokenize(TokenizeRequest(model.id, text, special=False, template_kwargs=variables))

    async def find_absence(self, policy: int, purpose: str) -> str | None:
        """Return why a policy's server cannot go on; ``None`` if it can, or if no other policy could replace it.

        The server is waited for as for a branch. The result is recorded for ``purpose``, which is asked once.
        """
        if len(self.policies) == 1:
            return None

        async def find() -> str:
            while True:
                try:
                    await self.tokenize("?", policy)
                except EngineUnavailable as error:
                    availability, seconds_left = self._shared.availability, self.ledger.seconds_left()
                    may_return = availability.record_failure(policy)
                    if may_return is None:
                        raise
                    if not may_return or seconds_left == 0.0:
                        return str(error) or type(error).__name__
                    pause = availability.find_pause(policy, error, seconds_left)
                else:
                    self._shared.availability.record_answer(policy)
                    return ""
                await run_unless(self._context.cancelled, partial(asyncio.sleep, pause))
                if self._context.cancelled.is_set():
                    raise JobCancelled

        reason = await self.record_result(f"reach:{purpose}:{policy}", find)
        if reason:
            self._absences[policy] = reason
        return reason or None

    async def _start_roots(self) -> list[Node]:
        """Ask each policy the question. Raises ``InvalidRequest`` if that leaves one of them no room for an answer."""
        messages = self.spec.to_messages()
        roots = [
            await self.start_conversation(self.root, messages, policy=index) for index in range(len(self.policies))
        ]
        for root in roots:
            check_room(root.prefix, self._context.policy(root).model)
        return roots

    def _find_thought(self, node: Node) -> None:
        """Set where a conversation's thought is at the end of its prompt."""
        thoughts = self._context.policy(node).thoughts
        if thoughts is not None:
            node.thought = thoughts.find_state(node.prefix)

    async def _add_text_node(self, node: Node) -> Node:
        assert node.parent is not None
        model = self._context.policy(node).model
        node.reason = "context" if len(node.prefix) >= model.context else "said"
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
            "fresh": node.starts_conversation,
            "undone": node.trimmed_chars,
        }
        if not node.is_solution:
            data["solves"] = False
        if len(self.policies) > 1:
            data["model"] = model.id
        if node.parts:
            data["parts"] = [[part.kind, part.origin, part.num_chars, part.num_tokens] for part in node.parts]
        await self._replay_log.record(f"say:{node.id}", "node", data, Usage())
        await self._record_prompt(node)
        return node

    async def _record_prompt(self, node: Node) -> None:
        """Write the tokens through a node that was not generated, for a job that records what training needs."""
        if self.spec.record_logprobs:
            data = {"node": node.id, "token_ids": write_tokens(node.prefix)}
            data |= self._shared.name_model(self._context.policy(node).model)
            await self._replay_log.record(f"prompt:{node.id}", "prompt", data, Usage())

    @staticmethod
    def _next_path(parent: Node) -> tuple[int, ...]:
        parent.num_children_requested += 1
        return (*parent.path, parent.num_children_requested - 1)

    # Decisions.

    async def record_result(self, key: str, find: Callable[[], Awaitable[str | None]]) -> str | None:
        """Return the recorded result for ``key``, or call ``find`` and record its result.

        For results that depend on more than the engine and the seed, such as the clock, and might differ in a replay.
        """
        if self._replay_log.is_replaying:
            entries = self._replay_log.replay((key,))
            if not entries:
                return await find()
        else:
            value = await find()
            late = {"late": True} if self.ledger.seconds_left() == 0.0 else {}
            entries = await self._replay_log.write([PendingEntry(key, "settled", {"value": value} | late, Usage())])
        data = entries[0].data
        self._shared.is_budget_exhausted |= data.get("late", False)
        result: str | None = data["value"]
        return result

    async def record_decision(self, key: str, data: dict[str, Any], *, saved: int = 0) -> None:
        """Write a decision for the client and for replays; ``saved`` is added to the bill's ``Usage.saved``.

        The decision is part of the key, so a replay that decides differently, because of other code or another table,
        raises ``ReplayMismatch``.
        """
        digest = blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=6).hexdigest()
        await self._replay_log.record(f"decide:{key}:{digest}", "decision", data, Usage(saved=saved))

    async def record_selection(self, node: Node | None) -> None:
        """Write the chosen leaf, as the last entry of a search."""
        await self._replay_log.record("select", "select", {"node": None if node is None else node.id}, Usage())

    async def compute_logprobs(self, node: Node, count: int) -> list[TokenProbability] | None:
        """Return the log-probabilities of a solution's tokens; ``None`` if the budget does not reach that far."""
        return await compute_logprobs(self._shared, node, count)

    # Candidates.

    def candidates(self) -> list[Node]:
        """Return the nodes among which the strategy chooses, in the order of their paths (``select_candidates``)."""
        return select_candidates(self.root.walk(), self.spec)

    async def add_candidates(self) -> list[Node]:
        """Add the client's own candidates to the tree, and return them."""
        return await add_candidates(self._shared)

    async def ensure_candidates(self) -> list[Node]:
        """Return the candidates of a finished step-by-step search.

        If no branch states an answer, the best one, which only the strategy's own limits stopped, is completed first.
        """
        if not self.candidates():
            await self._finish_best()
        return self.candidates()

    async def score_finished(self) -> None:
        """Score the finished solutions of a search, also those without an answer, so that the best text is known."""
        self.ledger.release_answer_reserve()
        if self._scores is not None:
            await self.score(list_finished(self.root.walk()))

    async def _finish_from_reserve(self) -> bool:
        """Complete the best branch with the budget that was set aside for it; return True if there was some."""
        if not self.ledger.has_answer_reserve:
            return False
        await self._finish_best()
        return True

    async def _finish_best(self) -> None:
        """Complete the best open branch greedily. From then on no budget is set aside."""
        self.ledger.release_answer_reserve()
        ends = [node for node in self.root.walk() if node.open and node.is_solution]
        leaves = [node for node in ends if not any(child.open for child in node.children)]
        best = find_best_leaf([node for node in leaves if self.max_new_tokens(node) > 0])
        if best is None:
            return
        async for nodes in self.complete([best], 1, greedy=True):
            if self._scores is not None:
                await self.score(nodes)

    def _next_request(self) -> TokenRequest:
        """Return the token request of a job that shares a budget, from the solutions that have ended."""
        compare = self.spec.answer.compare
        stated = {node: find_vote_form(node, compare) for node in self.candidates()}
        samples = [
            (stated.get(leaf), leaf.score)
            for leaf in self.root.walk()
            if leaf.parent is not None and not leaf.open and leaf.reason != "pruned" and leaf.is_solution
        ]
        trust = 1.0 if self.spec.has_conclusive_verifier else MAX_TRUST
        return JobProgress(samples, self.ledger.usage.total, trust).next_request()
