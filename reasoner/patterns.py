"""Regular expressions from clients: checked when they are submitted, matched under a time limit.

A pattern is what Python's ``re`` accepts. It is matched by the package ``regex``, which looks at the clock while it
backtracks. That package writes out counted repetitions when it compiles, so their product is bounded first.
"""

from __future__ import annotations

import math
import re

import regex

MAX_CHARS = 1000
MAX_REPEATS = 10_000
"""Bound on the product of all counts in braces: what compiling could write out."""
PATIENCE = 1.0
"""Seconds of matching in one text. A search that takes longer has found nothing."""
_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def check_pattern(pattern: str, *, groups: int | None = None) -> str:
    """The pattern itself; ``ValueError`` says what is wrong with it. ``groups``: how many it must have."""
    if len(pattern) > MAX_CHARS:
        raise ValueError(f"the pattern has {len(pattern)} characters; at most {MAX_CHARS} are allowed")
    counts = [max((int(text) for text in match.groups() if text), default=1) for match in _COUNT.finditer(pattern)]
    if math.prod(max(count, 1) for count in counts) > MAX_REPEATS:
        raise ValueError(f"the counts in braces multiply to more than {MAX_REPEATS}: use * or + for long repetitions")
    try:
        found = re.compile(pattern).groups
        regex.compile(pattern)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if groups is not None and found != groups:
        raise ValueError(f"the pattern has {found} groups; it needs {groups}: write (?:…) for the others")
    return pattern


def last_match(pattern: str, text: str) -> regex.Match[str] | None:
    """The last match of a checked pattern; ``None`` without one or when the search takes longer than ``PATIENCE``."""
    last = None
    try:
        for match in regex.finditer(pattern, text, timeout=PATIENCE):
            last = match
    except TimeoutError:
        return None
    return last


def matches(pattern: str, text: str) -> bool:
    """Whether a checked pattern matches the whole text; not when that takes longer than ``PATIENCE``."""
    try:
        return regex.fullmatch(pattern, text, timeout=PATIENCE) is not None
    except TimeoutError:
        return False
