"""The watch of a strategy, which can end a branch early."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from engine.protocol.types import Completion
from reasoner.search.branch_text import BranchText, Watch
from reasoner.search.rules.rule import End, NewBranch, Rule, Verdict


@dataclass(frozen=True, slots=True)
class WatchRule(Rule):
    """A branch ends where its watch says so."""

    watch: Watch

    @property
    def every(self) -> int:
        return self.watch.every

    async def after(self, text: BranchText, segment: Completion) -> Verdict:
        if segment.finish_reason != "length" or len(text.token_ids) % self.watch.every:
            return None
        verdict = self.watch.verdict(text)
        reason = await verdict if isinstance(verdict, Awaitable) else verdict
        return None if reason is None else End(reason)


def make_watch_rule(new: NewBranch) -> WatchRule | None:
    """Return the rule for branches with a watch."""
    return None if new.options.watch is None else WatchRule(new.options.watch)
