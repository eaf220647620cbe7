"""How often a computation was done for the first times: those that are recorded then are quicker ever after."""

from __future__ import annotations


class Firsts:
    """Of tapes and graphs of all kinds. Whoever measures times does not believe those in which it rose."""

    count = 0
