"""The limit of a branch's length."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol.types import Completion
from reasoner.search.branch_text import BranchText
from reasoner.search.rules.rule import End, NewBranch, Rule, Verdict


@dataclass(frozen=True, slots=True)
class LimitRule(Rule):
    """A branch ends with the last token that it may have."""

    is_step: bool
    """True if the limit is that of a step."""

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        if segment.finish_reason != "length" or text.tokens_left > 0:
            return None
        return End("step" if self.is_step else text.limit_reason)


def make_limit_rule(new: NewBranch) -> LimitRule:
    """Return the rule, which holds for every branch."""
    return LimitRule(new.is_step_limit)
