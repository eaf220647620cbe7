"""Branches that have fallen into a loop.

A model that writes the same words again and again goes on until its context is full. Such a branch ends when the end of
its text is one piece repeated, exactly and without a gap. What is long and regular but no loop must pass: rows of a
table differ somewhere, and lists of zeros, rulers and empty matrices repeat very few different tokens, so a piece that
poor has to fill far more of the text. Loops whose rounds differ, by a counter for example, are not found.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_REPEATS = 6
"""How often a piece stands there before it is a loop."""
MIN_LOOP_TOKENS = 240
"""Tokens that its rounds fill at least."""
MAX_POOR_VOCABULARY = 8
"""Different tokens up to which a piece is poor: a number and its separators, a ruler, an empty row of a table."""
MIN_POOR_LOOP_TOKENS = 1200
"""Tokens that the rounds of a poor piece fill at least."""
MAX_PERIOD = 256
"""Tokens of the longest piece that is looked for."""
WINDOW_TOKENS = max(MIN_REPEATS * MAX_PERIOD, MIN_POOR_LOOP_TOKENS)
"""Tokens at the end of a branch that decide; earlier ones are not looked at."""


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether the text ends in a loop. Takes time linear in ``WINDOW_TOKENS``, however long the text is.

    A text that ends in L tokens of period p is one whose reversal starts with them, and the shortest period of each
    start of a text follows from its failure function (Knuth, Morris and Pratt 1977, section 2).
    """
    text = tokens[-WINDOW_TOKENS:][::-1]
    if len(text) < MIN_LOOP_TOKENS:
        return False
    border = 0
    borders = [0] * len(text)
    """For each start of the text, the length of its longest proper start that is also its end."""
    for place in range(1, len(text)):
        while border and text[place] != text[border]:
            border = borders[border - 1]
        border += text[place] == text[border]
        borders[place] = border
        length, period = place + 1, place + 1 - border
        if length >= max(MIN_LOOP_TOKENS, MIN_REPEATS * period):
            poor = len(set(text[:period])) <= MAX_POOR_VOCABULARY
            if not poor or length >= MIN_POOR_LOOP_TOKENS:
                return True
    return False
