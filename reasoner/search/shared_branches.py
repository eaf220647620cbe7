"""Deduplication of equal branches: with greedy sampling one branch is generated, and its siblings copy it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from engine.protocol.wire import write_tokens
from reasoner.budget.usage import Usage
from reasoner.search.generation import Generation
from reasoner.search.replay import PendingEntry
from reasoner.tree import read_answer_level

CUT_REASONS = frozenset({"budget", "timeout", "cancelled"})
"""End reasons after which the rest of the branch is unknown, so that it cannot be copied."""

COPIED = ("parts", "thought", "vote", "calls", "words", "call_fault", "stop")
"""Further data of a branch's end that a copy has, too."""


class GreedyDedup:
    """The first branch of each group of equal ones in a search."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Generation] = {}

    def original(self, branch: Generation, is_pending: Callable[[Generation], bool]) -> Generation | None:
        """Return the branch that ``branch`` copies: one that was not cut short or is still pending.

        ``None`` if the branch has to be generated; later equal ones then copy it.
        """
        if branch.dedup_key is None:
            return None
        first = self._first.get(branch.dedup_key)
        if first is not None and first is not branch and branch.num_parts == 0:
            usable = is_pending(first) if first.end is None else first.end["reason"] not in CUT_REASONS
            if usable:
                return first
        self._first[branch.dedup_key] = branch
        return None

    def add_ended(self, branch: Generation) -> None:
        """Register a branch that has ended, now or in a replay."""
        assert branch.end is not None
        if branch.dedup_key is not None and branch.end["reason"] not in CUT_REASONS:
            self._first[branch.dedup_key] = branch


def copy_entry(branch: Generation, original: Generation) -> PendingEntry:
    """Return the journal entry of a copy: the original's text and end, without cost."""
    assert original.end is not None
    data = {
        "node": branch.id,
        "parent": branch.parent.id,
        "part": 0,
        "text": original.recorded.text,
        "token_ids": write_tokens(original.recorded.token_ids),
        "tokens": 0,
        "cached": 0,
        "logprob": original.logprob,
        "final": True,
        "reason": original.end["reason"],
        "answer": original.end["answer"],
        "answer_level": read_answer_level(original.end),
        "closed": original.end.get("closed", False),
        "copy_of": original.id,
    }
    if original.recorded.confidence:
        data["confidence"] = list(original.recorded.confidence)
    if original.recorded.logprobs is not None:
        data["logprobs"] = list(original.recorded.logprobs)
    data |= {name: original.end[name] for name in COPIED if name in original.end}
    if "probe" in original.end:
        data["probe"] = original.end["probe"]
    return PendingEntry(branch.key, "node", data, Usage())
