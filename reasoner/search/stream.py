"""A stream of branches: a strategy adds work at any time and gets every branch as soon as it ends.

A stream writes the journal before the strategy sees anything, so a replay returns the same batches in the same order.
In a ``deterministic`` job it returns waves: the branches of one call together, in path order, the calls in their order,
independent of the branches' speed. Branches in flight when such a stream is closed are not added to the tree and only
billed, and their reservations stay held, so that the remaining budget does not depend on how far they had come.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from engine.protocol.types import SamplingParams
from engine.protocol.wire import write_tokens
from reasoner.budget.prices import NO_AMOUNT, Amount
from reasoner.budget.usage import Usage
from reasoner.jobs.journal import Entry, JobCancelled
from reasoner.jobs.step_specs import StepRule
from reasoner.search.branch_runner import BranchRunner
from reasoner.search.branch_text import BranchText, StreamMonitor
from reasoner.search.calls.functions import SolutionEnd, read_end
from reasoner.search.generation import BranchPart, Generation, State, is_greedy, make_sampling_params
from reasoner.search.policies.kv_budget import bound_keys
from reasoner.search.replay import ARRIVED_AT_SHUTDOWN, BILLED_ONLY, PendingEntry
from reasoner.search.rules.chain import make_rules
from reasoner.search.rules.rule import BranchOptions, NewBranch
from reasoner.search.shared_branches import copy_entry
from reasoner.search.stream_context import StreamContext
from reasoner.thoughts import describe_thought
from reasoner.tree import Node, Reason, add_end, describe_refusal


class Stream:
    """Async context manager and iterator over new nodes; ``Search.stream`` makes one.

    Iteration yields all new nodes that are ready, at least one, and ends when every requested branch has ended or the
    budget is used up: branches that never started are then missing, and one that was cut has the reason ``budget``.
    More work may be added after that. Leaving the context aborts running branches.
    """

    def __init__(self, context: StreamContext, open_streams: set[Stream]) -> None:
        """``open_streams`` is the search's set of open streams, to which this one adds itself until it is closed."""
        self._context = context
        self._open_streams = open_streams
        self._pending: dict[str, Generation] = {}
        """Branches that have not ended, by the key of their next part."""
        self._calls = 0
        self._runner = BranchRunner(context)

    def expand(
        self,
        parents: Sequence[Node],
        n: int | Sequence[int],
        *,
        greedy: bool = False,
        steps: StepRule | None = None,
    ) -> int:
        """Add one step to each parent, ``n`` times (or ``n[i]`` times for parent ``i``); return the number of branches.

        A parent that fills the context or the job's own limit has none.

        ``greedy`` takes the likeliest token each time. ``steps``: a rule of the strategy's instead of the job's, which
        also splits thoughts.
        """
        steps = steps or self._context.search.spec.step_rule
        return self._add("expand", parents, n, BranchOptions(greedy=greedy, limit=steps.limit, steps=steps))

    def complete(
        self,
        parents: Sequence[Node],
        n: int | Sequence[int],
        *,
        greedy: bool = False,
        until: str | None = None,
        limit: int | None = None,
        confidence: int | None = None,
        monitor: StreamMonitor | None = None,
        ends_with_thought: bool = False,
    ) -> int:
        """Like ``expand``, to the end of the solution, or ``until`` this text (the node then ends with it, as a step),
        or to ``limit`` tokens at most.

        With ``confidence`` the nodes have the confidence of each token, computed from this many likeliest tokens. A
        ``monitor`` checks the branches while they are generated; one that it ends as ``pruned`` counts as wasted.
        ``ends_with_thought`` ends a branch, as a step, where its thought ends.
        """
        options = BranchOptions(
            greedy=greedy,
            limit=limit,
            confidence=confidence,
            until=until,
            ends_with_thinking=ends_with_thought,
            monitor=monitor,
        )
        return self._add("complete", parents, n, options)

    async def __aenter__(self) -> Stream:
        self._open_streams.add(self)
        return self

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Node]:
        while self._pending:
            entries = await self._next_batch()
            if not entries:
                self._context.is_budget_exhausted = True
                self._pending.clear()
                break
            nodes = self._apply(entries)
            if nodes:
                return nodes
        raise StopAsyncIteration

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in self._open_streams:  # else ``Search.close`` has closed it
            # With any other error the engine or this attempt is gone, and the next attempt continues the branches.
            await self.close(is_final=error is None or isinstance(error, (GeneratorExit, JobCancelled)))

    async def close(self, *, is_final: bool) -> None:
        """Abort the branches in flight and write their tokens so far.

        ``is_final``: the strategy is done, so branches end as ``cancelled`` and are added to the tree. Otherwise the
        next attempt continues them. Those that it cannot continue are only billed: in a deterministic job, where they
        would not arrive in waves, and on a server that cannot go on after the beginning of a solution.
        """
        self._open_streams.discard(self)
        log = self._context.replay_log
        if is_final:
            self._apply([*log.replay(self._pending), *log.unseen_after_cancel])
        parts = await self._runner.stop(final=is_final)
        lost = [part for part in parts if self._is_lost(part, is_final=is_final)]
        entries = [self._billed_only_entry(part, keep_reserved=is_final) for part in lost]
        parts = [part for part in parts if part not in lost]
        if is_final and not log.is_replaying:
            parts += self._cancel_waiting(parts)
        entries += [await self._part_entry(part) for part in parts]
        if is_final:
            self._apply(await log.write(entries))
        else:
            await log.write([replace(entry, data=entry.data | {ARRIVED_AT_SHUTDOWN: True}) for entry in entries])

    def _add(self, op: str, parents: Sequence[Node], n: int | Sequence[int], options: BranchOptions) -> int:
        search = self._context.search
        records = search.spec.record_logprobs
        logprobs = 0 if options.confidence is None and records else options.confidence
        params = [
            make_sampling_params(
                policy.sampling, greedy=options.greedy, stop=tuple(search.spec.stop), logprobs=logprobs
            )
            for policy in search.policies
        ]
        before = len(self._pending)
        counts = [n] * len(parents) if isinstance(n, int) else n
        for parent, count in zip(parents, counts, strict=True):
            most = self._context.max_new_tokens(parent)
            max_tokens = most if options.limit is None else min(most, options.limit)
            if max_tokens <= 0:
                continue
            context_left = search.policy(parent).model.context - len(parent.prefix)
            start = BranchText(
                parent,
                max_tokens,
                limit_reason="length" if max_tokens < context_left else "context",
                thinking=self._context.find_thinking(parent),
                logprobs=() if records else None,
            )
            rules = make_rules(
                NewBranch(search, parent, options, is_step_limit=options.steps is not None and max_tokens < most)
            )
            sampling = _count_earlier_tokens(params[parent.policy], parent)
            if sampling.kv_budget is not None:
                sampling = bound_keys(sampling, search.policy(parent), parent, self._context.seed)
            for index in range(parent.num_children_requested, parent.num_children_requested + count):
                branch = Generation(
                    op, (*parent.path, index), sampling=sampling, recorded=start, rules=rules, wave=self._calls
                )
                self._pending[branch.key] = branch
            parent.num_children_requested += count
        self._calls += 1
        return len(self._pending) - before

    async def _next_batch(self) -> list[Entry]:
        """Return the next parts of branches, from the journal or the engine; nothing if the budget is used up."""
        log = self._context.replay_log
        while True:
            entries = log.take_arrived_at_shutdown(self._pending)
            if not entries and log.is_replaying:
                entries = log.replay(self._pending)
            elif not entries:
                entries = await self._generate()
            if entries:
                return entries
            is_step = any(branch.op == "expand" for branch in self._pending.values())
            if not await self._context.can_retry(is_step=is_step):
                return [] if log.is_replaying else await self._write(self._cut_pending())

    def _cut_pending(self) -> list[BranchPart]:
        """Return the ends of branches that have a part and can get no more because the budget is used up."""
        reason: Reason = "timeout" if self._context.search.ledger.seconds_left() == 0.0 else "budget"
        return [branch.make_end(reason) for branch in self._pending.values() if branch.num_parts > 0]

    async def _generate(self) -> list[Entry]:
        """Write and return copies of branches that have ended, or else parts from the engine."""
        copies = self._context.copies
        originals = {branch: copies.original(branch, self._is_pending) for branch in self._pending.values()}
        ended = {branch: first for branch, first in originals.items() if first is not None and first.end is not None}
        if ended:
            return await self._context.replay_log.write([copy_entry(*pair) for pair in ended.items()])
        self._runner.start([branch for branch, first in originals.items() if first is None])
        parts = await self._runner.arrivals(wave=self._context.search.spec.deterministic)
        return await self._write(parts) if parts else []

    async def _write(self, parts: Sequence[BranchPart]) -> list[Entry]:
        # Extraction may be interrupted: until the parts are taken, a runner that is stopped returns them.
        entries = [await self._part_entry(part) for part in parts]
        self._runner.take(parts)
        return await self._context.replay_log.write(entries)

    def _is_lost(self, part: BranchPart, *, is_final: bool) -> bool:
        """Return True for a part of a stopped stream that is no part of the tree, now or in the next attempt."""
        search = self._context.search
        is_open = not is_final and part.reason is None
        return search.spec.deterministic or (is_open and not search.policy(part.branch.parent).can_continue)

    def _cancel_waiting(self, stopped: Iterable[BranchPart]) -> list[BranchPart]:
        """Return the ends of pending branches that have parts but were not in flight."""
        in_flight = {part.branch for part in stopped}
        begun = [branch for branch in self._pending.values() if branch.num_parts > 0 and branch not in in_flight]
        return [branch.make_end("cancelled") for branch in begun]

    def _is_pending(self, branch: Generation) -> bool:
        return self._pending.get(branch.key) is branch

    async def _part_entry(self, part: BranchPart) -> PendingEntry:
        """Return the journal entry of a part, with the answer that the branch states if it has ended."""
        branch = part.branch
        reason, stated = part.reason, SolutionEnd()
        if reason is not None:
            end = Node(branch.path, branch.parent, (), branch.recorded.text + part.text)
            end.parts = () if part.thinking is None else part.thinking.parts
            end.thought = part.thinking.state if part.thinking is not None and part.thinking.is_known else None
            if branch.parent.is_solution:
                stated = await read_end(end, reason, self._context.answers, self._context.search.functions)
            if stated.answer is not None and reason == "step":
                reason = "answer"
        spend = part.spend
        if reason == "pruned":
            spend = spend + Usage(pruned=len(branch.recorded.token_ids) + len(part.token_ids))
        data = {
            "node": branch.id,
            "parent": branch.parent.id,
            "part": branch.num_parts,
            "text": part.text,
            "token_ids": write_tokens(part.token_ids),
            "tokens": len(part.token_ids),
            "cached": part.spend.cached,
            "logprob": part.logprob,
            "final": reason is not None,
            "reason": reason,
            "closed": part.has_ended_turn,
            **stated.describe(),
        }
        data |= self._context.name_model(self._context.search.policy(branch.parent).model)
        if part.seconds is not None:
            data["seconds"] = round(part.seconds, 6)
        if part.thinking is not None:
            data |= describe_thought(part.thinking)
        if branch.reads_confidence:
            data["confidence"] = list(part.confidence)
        if part.logprobs is not None:
            data["logprobs"] = list(part.logprobs)
        if reason is not None and part.probe is not None:
            data["probe"] = part.probe
        if reason == "stop" and part.stop is not None:
            data["stop"] = part.stop
        if part.is_calling:
            data["calling"] = True
        if part.call_ended is not None:
            data["call_ended"] = part.call_ended
        data |= describe_refusal(part.refusal)
        return PendingEntry(branch.key, "node", data=data, spend=spend, reserved=part.reserved)

    def _apply(self, entries: Iterable[Entry]) -> list[Node]:
        """Apply parts to their pending branches, and return the nodes of those that ended."""
        pending = [(self._pending[entry.key], entry.data) for entry in entries if entry.key in self._pending]
        return [node for branch, data in pending if (node := self._apply_part(branch, data)) is not None]

    def _apply_part(self, branch: Generation, data: dict[str, Any]) -> Node | None:
        """Record a part of its branch, and return the node if the branch has ended."""
        del self._pending[branch.key]
        branch.record(data)
        if branch.state is not State.ENDED:
            self._pending[branch.key] = branch
            return None
        text, reason = branch.recorded, data["reason"]
        context = self._context
        context.copies.add_ended(branch)
        context.is_budget_exhausted |= reason in ("budget", "timeout")
        context.longest[branch.op] = max(context.longest.get(branch.op, 1), len(text.token_ids))
        if branch.op == "expand" and context.search.ledger.has_answer_reserve:
            context.reserve_for_answer()
        node = Node(
            path=branch.path,
            parent=branch.parent,
            prefix=branch.parent.prefix + text.token_ids,
            text=text.text,
            tokens=len(text.token_ids),
            logprob=0.0 if is_greedy(context.search.policy(branch.parent).sampling) else branch.logprob,
            confidence=text.confidence,
            probe=data.get("probe"),
            is_solution=branch.parent.is_solution,
            policy=branch.parent.policy,
            ended_with_eos=text.has_ended_turn,
            is_copy="copy_of" in data,
            parts=() if text.thinking is None else text.thinking.parts,
            thought=text.thinking.state if text.thinking is not None and text.thinking.is_known else None,
        )
        add_end(node, data)
        branch.parent.children.append(node)
        if node.answer is not None:
            context.search.ledger.release_answer_reserve()
        return node

    def _billed_only_entry(self, part: BranchPart, *, keep_reserved: bool) -> PendingEntry:
        """Return an entry that only bills the tokens of a part.

        ``keep_reserved`` keeps the rest of its reservation held, since its size depends on the branch's speed.
        """
        rest = part.reserved - Amount.from_usage(part.spend) if keep_reserved else NO_AMOUNT
        data = {"node": part.branch.id, "tokens": len(part.token_ids), "withheld": list(rest)}
        data |= self._context.name_model(self._context.search.policy(part.branch.parent).model)
        return PendingEntry(
            f"lost:{uuid.uuid4().hex}", BILLED_ONLY, data=data, spend=part.spend, reserved=part.reserved - rest
        )


def _count_earlier_tokens(sampling: SamplingParams, parent: Node) -> SamplingParams:
    """Return parameters whose penalties count what the solution has before the branch, which is part of its prompt."""
    num_written = len(parent.completion_ids) if sampling.counts_tokens else 0
    return replace(sampling, penalty_start=len(parent.prefix) - num_written) if num_written else sampling
