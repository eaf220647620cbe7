"""Detection of branches that repeat themselves in a loop.

A model in a loop generates until its context is full, so a branch is ended when its text ends in exact repetitions of
one piece without gaps. Long regular text must not be taken for a loop: rows of a table differ somewhere, and lists of
zeros, rulers and empty matrices repeat very few distinct tokens, so a piece with a poor vocabulary has to fill far more
of the text. Loops with small changes, such as a counter, are not detected.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MIN_REPEATS = 6
"""Minimum number of repetitions of a loop."""
MIN_LOOP_TOKENS = 240
"""Minimum number of tokens of all repetitions."""
MAX_POOR_VOCABULARY = 8
"""Maximum number of distinct tokens of a poor piece, such as a number with separators, a ruler, an empty table row."""
MIN_POOR_LOOP_TOKENS = 1200
"""Minimum number of tokens of all repetitions of a poor piece."""
MAX_PERIOD = 256
"""Maximum length of a repeated piece in tokens."""
WINDOW_TOKENS = max(MIN_REPEATS * MAX_PERIOD, MIN_POOR_LOOP_TOKENS)
"""Number of tokens at the end of a branch that are checked."""


def ends_in_loop(tokens: Sequence[Hashable]) -> bool:
    """Return True if the text ends in a loop, in time linear in ``WINDOW_TOKENS``.

    The reversed text then starts with the repetitions, and the shortest period of each prefix follows from the failure
    function (Knuth, Morris and Pratt 1977, section 2).
    """
    text = tokens[-WINDOW_TOKENS:][::-1]
    if len(text) < MIN_LOOP_TOKENS:
        return False
    border = 0
    borders = [0] * len(text)
    """Length of the longest proper border (prefix that is also a suffix) of each prefix of the reversed text."""
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
