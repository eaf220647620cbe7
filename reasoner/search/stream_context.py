"""State that all streams of one search share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from engine.protocol.types import EngineClient, ModelInfo
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.budget.ledger import Ledger
from reasoner.jobs.spec import JobSpec
from reasoner.search.grants import Grants
from reasoner.search.replay import ReplayLog
from reasoner.search.shared_branches import Copies
from reasoner.tree import Node

STEPS_TO_END = 4
"""Expected length of the rest of a branch, as a multiple of the longest step so far.

A branch that needs more has usually made progress by the time the search ends.
"""


@dataclass(slots=True, eq=False)
class StreamContext:
    spec: JobSpec
    seed: int
    engine: EngineClient
    policy: ModelInfo
    lease: str
    """Name of the job's lease on the engine's cache."""
    ledger: Ledger
    replay_log: ReplayLog
    cancelled: asyncio.Event
    answers: AnswerFinder
    root: Node
    is_cut_short: bool = False
    """True if the budget prevented an operation that the strategy requested."""
    longest: dict[str, int] = field(default_factory=dict)
    """Tokens of the longest branch so far, by operation."""
    copies: Copies = field(default_factory=Copies)
    grants: Grants | None = None
    """Grants of a job that shares a budget."""
    finish_from_reserve: Callable[[], Awaitable[bool]] | None = None
    """Function that completes the best branch with the budget set aside for it; it returns True if there was some."""

    async def can_retry(self, *, is_step: bool) -> bool:
        """Return True if an operation that the budget did not reach may be worth retrying.

        ``is_step``: it is a step of a search or its score, which may not use the budget that is set aside.
        """
        if self.grants is not None and await self.grants.request_more():
            return True
        return is_step and self.finish_from_reserve is not None and await self.finish_from_reserve()

    def set_aside(self) -> None:
        """Set aside the budget that one branch is expected to need to reach its end."""
        rate, prompt = self.ledger.rate_of_model(self.policy), len(self.root.prefix)
        most = self.max_new_tokens(self.root)
        likely = min(most, STEPS_TO_END * self.longest.get("expand", most))
        self.ledger.set_aside(*(rate.max_branch_amount(prompt + tokens, tokens) for tokens in (most, likely)))

    def max_new_tokens(self, node: Node) -> int:
        """Return the tokens that a continuation of the node may have, by the context and the job's own limit."""
        context_left = self.policy.context - len(node.prefix)
        limit = self.spec.sampling.max_tokens
        return context_left if limit is None else min(context_left, limit - node.depth_tokens)
