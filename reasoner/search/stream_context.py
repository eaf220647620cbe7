"""The dependencies of a search, and the state that its streams share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from engine.protocol.constraint import Constraint
from engine.protocol.types import EngineClient, ModelInfo
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.budget.ledger import Ledger
from reasoner.confidence.calibration import Calibration
from reasoner.jobs.journal import Journal
from reasoner.jobs.spec import JobSpec
from reasoner.search.cache_lease import CacheLease
from reasoner.search.calls import CallRunner
from reasoner.search.function_calls import FunctionReader
from reasoner.search.grants import Grants
from reasoner.search.policies.policy import Policy
from reasoner.search.replay import ReplayLog
from reasoner.search.scoring import NodeScorer, PairScorer
from reasoner.search.shared_branches import Copies
from reasoner.thoughts import UNKNOWN, ThoughtProgress, ToldThought
from reasoner.tree import Node

STEPS_TO_END = 4
"""Expected length of the rest of a branch, as a multiple of the longest step so far.

A branch that needs more has usually made progress by the time the search ends.
"""


@dataclass(frozen=True, slots=True)
class SearchContext:
    """A search's job and its dependencies."""

    spec: JobSpec
    engine: EngineClient
    policies: tuple[Policy, ...]
    """The models that write the solutions, usually one."""
    lease: CacheLease
    journal: Journal
    ledger: Ledger
    equivalence: Equivalence
    """Compares answers within the job's time."""
    cancelled: asyncio.Event
    scorer: NodeScorer | None = None
    """The job's verifier, if the strategy uses one that scores solutions."""
    comparer: PairScorer | None = None
    """The job's verifier, if the strategy uses one that compares solutions."""
    verifier: ModelInfo | None = None
    """The verifier's model, if it has one and the strategy uses it."""
    calibration: Calibration | None = None
    """Calibration table that holds for the job's models, if there is one."""
    functions: FunctionReader | None = None
    """Reads calls of the client's functions, if the job has any."""
    calls: CallRunner | None = None
    """Runs the calls of branches, if the job allows a tool."""

    forced_calls: Constraint | None = None
    """Language of the calls with which solutions must end, if the engine can hold them to it."""

    @property
    def constraint(self) -> Constraint | None:
        """Language of the solutions after their thoughts, if there is one."""
        return self.forced_calls if self.spec.constraint is None else self.spec.constraint.to_constraint()

    def policy(self, node: Node) -> Policy:
        """Return the policy that continues a node."""
        return self.policies[node.policy]


@dataclass(slots=True, eq=False)
class StreamContext:
    """State that all streams of one search share."""

    search: SearchContext
    seed: int
    replay_log: ReplayLog
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

    def name_model(self, model: ModelInfo | None) -> dict[str, str]:
        """Return journal data by which an entry is billed to a model; nothing if the job has one policy alone."""
        return {"model": model.id} if model is not None and len(self.search.policies) > 1 else {}

    def set_aside(self) -> None:
        """Set aside the budget that one branch is expected to need to reach its end."""
        ledger, prompt = self.search.ledger, len(self.root.prefix)
        rate = ledger.rate_of_model(self.search.policies[0].model)
        most = self.max_new_tokens(self.root)
        likely = min(most, STEPS_TO_END * self.longest.get("expand", most))
        ledger.set_aside(*(rate.max_branch_amount(prompt + tokens, tokens) for tokens in (most, likely)))

    def thought_at(self, node: Node) -> ThoughtProgress | None:
        """Return where the thought of a node's conversation is at its end."""
        thoughts = self.search.policy(node).thoughts
        if thoughts is None or node.thought is None:
            return None if self.search.calls is None else ThoughtProgress(UNKNOWN, "closed")
        if thoughts.is_told:
            return ToldThought(thoughts, node.thought, node.thought_tokens)
        limit = self.search.spec.thinking_tokens
        return ThoughtProgress(thoughts, node.thought, node.thought_tokens, limit, above=node.turn_parts)

    def max_new_tokens(self, node: Node) -> int:
        """Return the tokens that a continuation of the node may have, by the context and the job's own limit."""
        context_left = self.search.policy(node).model.context - len(node.prefix)
        limit = self.search.spec.sampling.max_tokens
        return context_left if limit is None else min(context_left, limit - node.depth_tokens)
