"""Calls of tools: a branch ends its part with a call, and goes on after the tool's output."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.protocol.types import Completion
from reasoner.search.branch_text import BranchText
from reasoner.search.rules.rule import Call, Continue, End, NewBranch, NextRequest, Rule, Verdict
from reasoner.tools.calls import CallReader


@dataclass(frozen=True, slots=True)
class ToolCallRule(Rule):
    """Requests end where a call may be complete."""

    reader: CallReader
    max_calls: int
    """Maximum number of calls of one solution."""

    def adapt(self, text: BranchText, request: NextRequest) -> NextRequest:  # noqa: ARG002
        stop = tuple(dict.fromkeys((*request.sampling.stop, *self.reader.stops)))
        return replace(request, sampling=replace(request.sampling, stop=stop))

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        is_delimiter = segment.stop in self.reader.stops
        ends_turn = not isinstance(segment.stop, str)
        if segment.finish_reason != "stop" or not (is_delimiter or ends_turn):
            return None
        if self.reader.find(text.texts_between_outputs[-1], ends_turn=ends_turn) is None:
            return Continue() if is_delimiter else None
        if text.num_calls >= self.max_calls:
            return End("tool")
        return Call() if text.tokens_left > 0 else Continue()


def make_tool_call_rule(new: NewBranch) -> ToolCallRule | None:
    """Return the rule for solutions of a job with a tool. A conversation about solutions calls nothing."""
    calls = new.search.calls
    return None if calls is None or not new.parent.is_solution else ToolCallRule(calls.reader, calls.max_calls)
