"""Branches that must be equal: where every token is the likeliest one, one branch grows and its siblings are copies."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from reasoner.budget.usage import Usage
from reasoner.search.branch_runner import Growth
from reasoner.search.replay import Answer

CUT = frozenset({"budget", "timeout", "cancelled"})
"""Ends that say nothing of where the branch would have gone."""


class Copies:
    """The first branch of each kind of equal ones in a search."""

    def __init__(self) -> None:
        self._first: dict[Hashable, Growth] = {}

    def original(self, growth: Growth, grows: Callable[[Growth], bool]) -> Growth | None:
        """Return the branch that ``growth`` has to equal, if that one has ended by itself or still ``grows``.

        ``None`` says that this branch is to be grown: for all that come after it.
        """
        if growth.equality is None:
            return None
        first = self._first.get(growth.equality)
        if first is not None and first is not growth and growth.part == 0:
            usable = grows(first) if first.end is None else first.end["reason"] not in CUT
            if usable:
                return first
        self._first[growth.equality] = growth
        return None

    def ended(self, growth: Growth) -> None:
        """Take note of a branch that has ended, as it did now or, in a replay, before."""
        assert growth.end is not None
        if growth.equality is not None and growth.end["reason"] not in CUT:
            self._first[growth.equality] = growth


def copied(growth: Growth, original: Growth) -> Answer:
    """Return what the journal says of a copy: the original's text and end, for no tokens."""
    assert original.end is not None
    data = {
        "node": growth.id,
        "parent": growth.parent.id,
        "part": 0,
        "text": original.text,
        "token_ids": list(original.token_ids),
        "tokens": 0,
        "cached": 0,
        "logprob": original.logprob,
        "final": True,
        "reason": original.end["reason"],
        "answer": original.end["answer"],
        "closed": original.end.get("closed", False),
        "copy_of": original.id,
    }
    if original.confidence:
        data["confidence"] = list(original.confidence)
    return Answer(growth.key, "node", data, Usage())
