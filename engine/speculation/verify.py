"""Verification of drafts against the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduler.draft import Draft


def find_accepted(draft: Draft, sampled: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the accepted draft tokens, those that plain decoding would have sampled, in their order.

    ``sampled``: the token sampled after the branch's last one, then, for each draft token, the one sampled after it:
    ``1 + len(draft)``. The branch's next tokens are the accepted ones and the one sampled after the last of them.
    """
    path: list[int] = []
    last, expected = -1, sampled[0]
    # Draft tokens come after those that they follow.
    for index, token in enumerate(draft.tokens):
        if token == expected and draft.parents[index] == last:
            path.append(index)
            last, expected = index, sampled[index + 1]
    return tuple(path)
