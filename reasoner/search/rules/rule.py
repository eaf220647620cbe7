"""The interface of the rules: what they say about a branch's text, and about its next request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol.constraint import Constraint
from engine.protocol.types import Completion, SamplingParams, Tokens
from reasoner.jobs.step_specs import StepRule
from reasoner.search.branch_text import BranchText, StreamMonitor
from reasoner.search.context import SearchContext
from reasoner.search.policies.policy import Policy
from reasoner.tree import Node, Reason


@dataclass(frozen=True, slots=True)
class Continue:
    """The branch goes on after this segment, whatever stopped it."""


@dataclass(frozen=True, slots=True)
class End:
    """The branch ends here."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Inject:
    """The search adds a text, fewer tokens than the branch has left, after which the branch goes on, or ends."""

    token_ids: Tokens
    text: str = ""
    end: Reason | None = None
    """Reason for which the branch ends after the text."""


@dataclass(frozen=True, slots=True)
class Call:
    """The text ends with a call of a tool, which runs before the branch goes on."""


Verdict = Continue | End | Inject | Call | None
"""Verdict of a rule on a text; ``None`` leaves it to the rules after it."""


@dataclass(frozen=True, slots=True)
class NextRequest:
    """The next request of a branch."""

    sampling: SamplingParams
    max_tokens: int
    can_be_cut: bool = True
    """True if it may end anywhere, since another one can go on there."""
    constraint: Constraint | None = None
    constraint_start: int | None = None
    """Position in the prompt from which the constraint holds."""
    constraint_escape_tokens: Tokens = ()


class Rule:
    """A rule that cuts or extends the text of a branch.

    Rules are asked in the order of their list, before each request and after each segment that one has returned. The
    first one that ends the branch, or calls a tool, is the last to be asked; those after one that continues the branch
    or injects a text see the segment as if nothing had stopped it. What a rule says depends on the text alone, so that
    a replay, and a branch that is cut elsewhere, end alike. Equal rules let greedy branches share one text.
    """

    @property
    def every(self) -> int | None:
        """Interval of lengths at which the rule sees the text, even where nothing stops it."""
        return None

    def before(self, text: BranchText) -> Verdict:  # noqa: ARG002
        """Return what happens before the next request."""
        return None

    def adapt(self, text: BranchText, request: NextRequest) -> NextRequest:  # noqa: ARG002
        """Return the next request with what the rule changes in it. The first rule of the list has the last word."""
        return request

    async def after(self, text: BranchText, segment: Completion) -> Verdict:  # noqa: ARG002
        """Return what happens after a segment, with which the text ends."""
        return None


@dataclass(frozen=True, slots=True)
class BranchOptions:
    """Options of a strategy for branches that it adds."""

    greedy: bool = False
    limit: int | None = None
    """Limit of their tokens."""
    confidence: int | None = None
    """Number of likeliest tokens from which the confidence of each token is computed."""
    steps: StepRule | None = None
    """Rule by which they end as steps; ``None`` for whole solutions."""
    until: str | None = None
    """Text at which they end as steps."""
    ends_with_thinking: bool = False
    """True if they end as steps where their thinking ends."""
    monitor: StreamMonitor | None = None


@dataclass(frozen=True, slots=True)
class NewBranch:
    """A branch that is about to begin, for which the rules are made."""

    search: SearchContext
    parent: Node
    options: BranchOptions
    is_step_limit: bool
    """True if the limit of its length is that of a step."""

    @property
    def policy(self) -> Policy:
        return self.search.policy(self.parent)
