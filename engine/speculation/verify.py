"""Which guesses were right."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.draft import Draft


def accepted(draft: Draft, drawn: Sequence[int]) -> tuple[int, ...]:
    """Indices of the guesses that plain decoding would have drawn, in their order.

    ``drawn``: the token that the branch draws after its last one, and then, for each guess, the one that it draws after
    that guess: ``1 + len(draft)``. The tokens of the branch are those guesses and the draw after the last of them.
    """
    if draft.is_chain:
        right = 0
        while right < len(draft.tokens) and draft.tokens[right] == drawn[right]:
            right += 1
        return tuple(range(right))
    children: dict[tuple[int, int], int] = {}
    for index, place in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        children.setdefault(place, index)
    path: list[int] = []
    node: int | None = children.get((-1, drawn[0]))
    while node is not None:
        path.append(node)
        node = children.get((node, drawn[node + 1]))
    return tuple(path)
