"""Loops: a branch that repeats itself ends soon after it began to."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol.types import Completion
from reasoner.search.branch_text import BranchText
from reasoner.search.rules.rule import End, NewBranch, Rule, Verdict


@dataclass(frozen=True, slots=True)
class RepetitionRule(Rule):
    """A branch that would go on in a loop ends."""

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        return End("repetition") if segment.finish_reason == "length" and text.is_in_loop else None


def make_repetition_rule(_: NewBranch) -> RepetitionRule:
    """Return the rule, which holds for every branch."""
    return RepetitionRule()
