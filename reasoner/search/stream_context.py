"""The state that all streams of one search share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from engine.protocol.types import ModelInfo
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.search.context import SearchContext
from reasoner.search.grants import Grants
from reasoner.search.policies.availability import Availability
from reasoner.search.replay import ReplayLog
from reasoner.search.shared_branches import GreedyDedup
from reasoner.thoughts import UNKNOWN, ThoughtProgress
from reasoner.tree import Node

STEPS_TO_END = 4
"""Expected length of the rest of a branch, as a multiple of the longest step so far.

A branch that needs more has usually made progress by the time the search ends.
"""


@dataclass(slots=True, eq=False)
class StreamContext:
    """State that all streams of one search share."""

    search: SearchContext
    seed: int
    replay_log: ReplayLog
    answers: AnswerFinder
    root: Node
    is_budget_exhausted: bool = False
    """True if the budget prevented an operation that the strategy requested."""
    longest: dict[str, int] = field(default_factory=dict)
    """Tokens of the longest branch so far, by operation."""
    copies: GreedyDedup = field(default_factory=GreedyDedup)
    availability: Availability = field(init=False)
    grants: Grants | None = None
    """Grants of a job that shares a budget."""
    finish_from_reserve: Callable[[], Awaitable[bool]] | None = None
    """Function that completes the best branch with the budget set aside for it; it returns True if there was some."""

    def __post_init__(self) -> None:
        self.availability = Availability(self.search.policies)

    async def can_retry(self, *, is_step: bool) -> bool:
        """Return True if an operation that the budget did not reach may be worth retrying.

        ``is_step``: it is a step of a search or its score, which may not use the budget that is set aside.
        """
        if self.grants is not None and await self.grants.request_more():
            return True
        return is_step and self.finish_from_reserve is not None and await self.finish_from_reserve()

    def name_model(self, model: ModelInfo | None) -> dict[str, str]:
        """Return journal data by which an entry is billed to a model; nothing if the job has one policy alone."""
        return {"model": model.id} if model is not None and len(self.search.policies) > 1 else {}

    def reserve_for_answer(self) -> None:
        """Set aside the budget that one branch is expected to need to reach its end."""
        ledger, prompt = self.search.ledger, len(self.root.prefix)
        rate = ledger.rate_of_model(self.search.policies[0].model)
        most = self.max_new_tokens(self.root)
        likely = min(most, STEPS_TO_END * self.longest.get("expand", most))
        ledger.reserve_for_answer(*(rate.max_branch_amount(prompt + tokens, tokens) for tokens in (most, likely)))

    def find_thinking(self, node: Node) -> ThoughtProgress | None:
        """Return where the thinking of a node's conversation is at its end."""
        thoughts = self.search.policy(node).thoughts
        if thoughts is None or node.thought is None:
            return None if self.search.calls is None else ThoughtProgress(UNKNOWN, "closed")
        return ThoughtProgress(thoughts, node.thought, node.thought_tokens, above=node.turn_parts)

    def max_new_tokens(self, node: Node) -> int:
        """Return the tokens that a continuation of the node may have, by the context and the job's own limit."""
        context_left = self.search.policy(node).model.context - len(node.prefix)
        limit = self.search.spec.sampling.max_tokens
        return context_left if limit is None else min(context_left, limit - node.depth_tokens)
