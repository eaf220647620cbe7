"""Servers that write a solution in one piece."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.protocol.types import Completion
from reasoner.search.branch_text import BranchText
from reasoner.search.rules.rule import End, NewBranch, NextRequest, Rule, Verdict


@dataclass(frozen=True, slots=True)
class ContinuationRule(Rule):
    """A branch whose server cannot go on after its beginning is one request, and ends where that was cut."""

    def adapt(self, text: BranchText, request: NextRequest) -> NextRequest:  # noqa: ARG002
        return replace(request, can_be_cut=False)

    async def after(self, text: BranchText, segment: Completion) -> Verdict:  # noqa: ARG002
        return End("budget") if segment.finish_reason == "length" else None


def make_continuation_rule(new: NewBranch) -> ContinuationRule | None:
    """Return the rule for branches on such a server."""
    return None if new.policy.can_continue else ContinuationRule()
