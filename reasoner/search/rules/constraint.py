"""The language that a job's answers are held to, after their thinking."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.protocol.constraint import Constraint
from engine.protocol.types import Capability, Completion
from reasoner.search.branch_text import BranchText
from reasoner.search.rules.rule import End, NewBranch, NextRequest, Rule, Verdict


@dataclass(frozen=True, slots=True)
class ConstraintRule(Rule):
    """Requests that write an answer are held to the constraint."""

    constraint: Constraint
    is_of_calls: bool
    """True if it holds the calls that the job demands, instead of what the job gives as its constraint."""
    can_continue: bool
    """True if the server can go on in the middle of a constrained text."""

    def adapt(self, text: BranchText, request: NextRequest) -> NextRequest:
        if not self._applies_to(text):
            return request
        thinking = text.thinking
        is_undecided = thinking is not None and thinking.state == "undecided"  # the model may open a thought instead
        return replace(
            request,
            constraint=self.constraint,
            constraint_start=text.answer_position,
            constraint_escape_tokens=thinking.format.opening_ids[:1] if thinking is not None and is_undecided else (),
            can_be_cut=request.can_be_cut and self.can_continue,
        )

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        """End what the server cannot go on with."""
        is_cut = segment.finish_reason == "length" and self._applies_to(text) and text.answer_position < text.position
        return End("budget") if is_cut and not self.can_continue else None

    def _applies_to(self, text: BranchText) -> bool:
        """Return True if the next token is one of the constrained text."""
        thinking = text.thinking
        if thinking is None:
            return True
        # Where a server cannot lift it for a thought, calls that 'tool_choice' demands are filtered instead.
        is_open = self.is_of_calls and thinking.state == "undecided" and not self.can_continue
        return thinking.can_begin_answer and not is_open


def make_constraint_rule(new: NewBranch) -> ConstraintRule | None:
    """Return the rule for solutions of a job with a constraint."""
    constraint = new.search.constraint
    if constraint is None or not new.parent.is_solution:
        return None
    can_continue = Capability.CONSTRAINT_CONTINUATION in new.policy.model.capabilities
    return ConstraintRule(constraint, is_of_calls=new.search.spec.constraint is None, can_continue=can_continue)
