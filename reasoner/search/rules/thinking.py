"""The end of the thinking: the model's own, after which its answer begins, or the one that a limit forces."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.protocol.types import Completion
from reasoner.search.branch_text import BranchText
from reasoner.search.rules.rule import End, Inject, NewBranch, NextRequest, Rule, Verdict


@dataclass(frozen=True, slots=True)
class ThinkingRule(Rule):
    """Requests end with the thinking, and a thought at its limit is closed."""

    limit: int | None
    """Maximum number of generated tokens of a conversation's thinking."""
    ends_branch: bool
    """True if the branch ends, as a step, with the thinking."""

    def before(self, text: BranchText) -> Verdict:
        """Close a thought at its limit, if that leaves room for an answer."""
        thinking = text.thinking
        if thinking is None or self.limit is None or thinking.state == "closed" or thinking.num_tokens < self.limit:
            return None
        closing, token_ids = thinking.make_forced_end()
        if len(token_ids) >= text.tokens_left:
            return End(text.limit_reason)
        return Inject(token_ids, closing, end="step" if self.ends_branch else None)

    def adapt(self, text: BranchText, request: NextRequest) -> NextRequest:
        """Let the request end with the thinking, and not go beyond its limit."""
        thinking = text.thinking
        if thinking is None or thinking.state == "closed":
            return request
        if thinking.format.is_told:  # most templates do not render the beginning of a thought
            return replace(request, can_be_cut=False)
        if self.limit is not None:
            request = replace(request, max_tokens=min(request.max_tokens, self.limit - thinking.num_tokens))
        sampling, end_token = request.sampling, thinking.format.end_token
        if end_token is None:
            sampling = replace(sampling, stop=(*sampling.stop, thinking.format.closing))
        else:
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, end_token))
        return replace(request, sampling=sampling)

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        """Add the rest of the delimiter that the model has begun, after which it answers."""
        thinking = text.thinking
        if thinking is None or thinking.format.is_told or not segment.token_ids or not thinking.has_just_closed:
            return None
        return Inject(thinking.format.rest_ids, end="step" if self.ends_branch else None)


def make_thinking_rule(new: NewBranch) -> ThinkingRule | None:
    """Return the rule for a model that is known to think. A server that tells its thoughts limits them itself."""
    thoughts = new.policy.thoughts
    if thoughts is None:
        return None
    limit = None if thoughts.is_told else new.search.spec.thinking_tokens
    return ThinkingRule(limit, ends_branch=new.options.steps is not None or new.options.ends_with_thinking)
