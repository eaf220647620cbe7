"""Detection of branches that repeat themselves in a loop.

A model that writes the same words again and again goes on until its context is full. Such a branch ends when the end of
its text is one piece repeated, exactly and without a gap. What is long and regular but no loop must pass: rows of a
table differ somewhere, and lists of zeros, rulers and empty matrices repeat very few different tokens, so a piece that
poor has to fill far more of the text. Loops whose rounds differ, by a counter for example, are not found.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_REPEATS = 6
"""Least number of repetitions of a loop."""
MIN_LOOP_TOKENS = 240
"""Least number of tokens of all repetitions."""
MAX_POOR_VOCABULARY = 8
"""Different tokens up to which a piece is poor, such as a number with its separators, a ruler, an empty table row."""
MIN_POOR_LOOP_TOKENS = 1200
"""Least number of tokens of all repetitions of a poor piece."""
MAX_PERIOD = 256
"""Length in tokens of the longest piece that is found."""
WINDOW_TOKENS = max(MIN_REPEATS * MAX_PERIOD, MIN_POOR_LOOP_TOKENS)
"""Number of tokens at the end of a branch that are checked."""


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Return True if the text ends in a loop, in time linear in ``WINDOW_TOKENS``, however long the text is.

    A text that ends in L tokens of period p is one whose reversal starts with them, and the shortest period of each
    start of a text follows from its failure function (Knuth, Morris and Pratt 1977, section 2).
    """
    text = tokens[-WINDOW_TOKENS:][::-1]
    if len(text) < MIN_LOOP_TOKENS:
        return False
    border = 0
    borders = [0] * len(text)
    """For each start of the text, the length of its longest proper start that is also its end."""
    for index in range(1, len(text)):
        while border and text[index] != text[border]:
            border = borders[border - 1]
        border += text[index] == text[border]
        borders[index] = border
        length, period = index + 1, index + 1 - border
        if length >= max(MIN_LOOP_TOKENS, MIN_REPEATS * period):
            poor = len(set(text[:period])) <= MAX_POOR_VOCABULARY
            if not poor or length >= MIN_POOR_LOOP_TOKENS:
                return True
    return False
