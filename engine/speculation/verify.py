"""Which guesses were right."""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduler.draft import Draft


def accepted(draft: Draft, drawn: Sequence[int]) -> tuple[int, ...]:
    """Indices of the guesses that plain decoding would have drawn, in their order.

    ``drawn``: the token that the branch draws after its last one, and then, for each guess, the one that it draws after
    that guess: ``1 + len(draft)``. The tokens of the branch are those guesses and the draw after the last of them.
    """
    path: list[int] = []
    last, due = -1, drawn[0]
    # Guesses come after those that they follow.
    for index, token in enumerate(draft.tokens):
        if token == due and draft.parents[index] == last:
            path.append(index)
            last, due = index, drawn[index + 1]
    return tuple(path)
