"""The monitor of a strategy, which can end a branch early."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from engine.protocol.types import Completion
from reasoner.search.branch_text import BranchText, StreamMonitor
from reasoner.search.rules.rule import End, NewBranch, Rule, Verdict


@dataclass(frozen=True, slots=True)
class MonitorRule(Rule):
    """A branch ends where its monitor says so."""

    monitor: StreamMonitor

    @property
    def every(self) -> int:
        return self.monitor.every

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        if segment.finish_reason != "length" or len(text.token_ids) % self.monitor.every:
            return None
        checked = self.monitor.check(text)
        reason = await checked if isinstance(checked, Awaitable) else checked
        return None if reason is None else End(reason)


def make_monitor_rule(new: NewBranch) -> MonitorRule | None:
    """Return the rule for branches with a monitor."""
    return None if new.options.monitor is None else MonitorRule(new.options.monitor)
