"""The rule by which a conversation that is too long for a verifier is shortened.

First the outputs of tools lose their middles, the longest first: none keeps more characters than a bound, the largest
with which the conversation fits, half of them at its beginning and half at its end. Where that is not enough with
``MIN_OUTPUT_CHARS``, whole messages are left out, the oldest first after the first one. A mark says how much is missing
in each place. The last message is always kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from reasoner.jobs.candidate_spec import Piece

MIN_OUTPUT_CHARS = 200


async def shorten(
    pieces: Sequence[Piece], limit: int, count: Callable[[str], Awaitable[int]]
) -> tuple[list[Piece], int]:
    """Return the pieces with ``limit`` tokens at most, and the number of characters that were left out.

    ``count`` returns the tokens of a text. The result may still be too long if the first and the last message are.
    """
    sizes = [await count(piece.text) for piece in pieces]
    if sum(sizes) <= limit:
        return list(pieces), 0
    longest = max((len(piece.text) for piece in pieces if piece.kind == "output"), default=0)
    low, high, fitting = MIN_OUTPUT_CHARS, longest, None
    while low <= high:  # the largest bound with which it fits
        bound = (low + high) // 2
        cut = [_cut_middle(piece, bound) for piece in pieces]
        if await _count_all(cut, pieces, sizes, count) <= limit:
            low, fitting = bound + 1, cut
        else:
            high = bound - 1
        if high - low < longest // 100:  # near enough
            break
    if fitting is None:
        fitting = await _drop_messages([_cut_middle(piece, MIN_OUTPUT_CHARS) for piece in pieces], limit, count)
    return fitting, sum(len(piece.text) for piece in pieces) - sum(len(piece.text) for piece in fitting)


async def _drop_messages(pieces: Sequence[Piece], limit: int, count: Callable[[str], Awaitable[int]]) -> list[Piece]:
    """Return the pieces without the oldest messages after the first one, as many as must be left out."""
    sizes = [await count(piece.text) for piece in pieces]
    last, total = pieces[-1].message, sum(sizes)
    dropped = 0
    for message in range(1, last):
        if total + await count(_mark_messages(dropped)) <= limit:
            break
        total -= sum(size for size, piece in zip(sizes, pieces, strict=True) if piece.message == message)
        dropped = message
    if not dropped:
        return list(pieces)
    mark = Piece(_mark_messages(dropped), "label", 1)
    first = [piece for piece in pieces if piece.message == 0]
    return [*first, mark, *(piece for piece in pieces if piece.message > dropped)]


async def _count_all(
    cut: Sequence[Piece], pieces: Sequence[Piece], sizes: Sequence[int], count: Callable[[str], Awaitable[int]]
) -> int:
    """Return the tokens of pieces of which some are cut; ``sizes`` are those of the whole ones."""
    return sum(
        [
            size if short is piece else await count(short.text)
            for short, piece, size in zip(cut, pieces, sizes, strict=True)
        ]
    )


def _cut_middle(piece: Piece, bound: int) -> Piece:
    """Return an output with ``bound`` characters at most, besides the mark; other pieces are kept."""
    if piece.kind != "output" or len(piece.text) <= bound:
        return piece
    mark = f"\n[{len(piece.text) - bound} characters left out]\n"
    if len(piece.text) <= bound + len(mark):
        return piece
    return replace(piece, text=piece.text[: bound - bound // 2] + mark + piece.text[len(piece.text) - bound // 2 :])


def _mark_messages(count: int) -> str:
    return f"\n\n[{count} message{'s' * (count != 1)} left out]"
