"""Regular expressions from clients: read when they are submitted, compiled and matched in a child process with limits.

A pattern is in the syntax of Python's ``re``. It is matched by the package ``regex``, which writes counted repetitions
out when it compiles: what that could make is bounded first, from the parse alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from reasoner.subprocess_pool import WorkerPool

MAX_CHARS = 1000
MAX_PARTS = 20_000
"""Bound on the parts of a pattern when its counted repetitions are written out."""
PATIENCE = 1.0
"""Seconds of matching in one text. A search that takes longer has found nothing."""
_CHILD_PATIENCE = 2.0 * PATIENCE
"""Seconds of processor time for one question: compiling comes first, and not all of matching looks at the clock."""
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)

POOL = WorkerPool("reasoner.regex_worker")


@dataclass(frozen=True, slots=True)
class LastMatch:
    """The first group of a pattern's last match, and where the match ends; both ``None`` where there is none."""

    group: str | None
    end: int | None


def check_pattern(pattern: str, *, groups: int | None = None) -> str:
    """Return the pattern itself; ``ValueError`` says what is wrong with it. ``groups``: how many it must have.

    Nothing is compiled here: that may take far longer than reading.
    """
    if len(pattern) > MAX_CHARS:
        raise ValueError(f"the pattern has {len(pattern)} characters; at most {MAX_CHARS} are allowed")
    try:
        tree = _parser.parse(pattern)
        size = parts(tree)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if size > MAX_PARTS:
        raise ValueError(
            f"the counts in braces multiply to more than {MAX_PARTS} parts: written out, this pattern has {size}; use "
            "smaller counts, or * and + for long repetitions"
        )
    found = tree.state.groups - 1
    if groups is not None and found != groups:
        raise ValueError(f"the pattern has {found} groups; it needs {groups}: write (?:…) for the others")
    return pattern


def parts(tree: Any) -> int:
    """Return the number of characters, sets and references of a parsed pattern whose counted repetitions are written
    out. ``tree``: of ``re``'s own parser, lists of (operator, arguments)."""
    total = 0
    for operator, arguments in tree:
        if operator in _REPEATS:
            low, high, repeated = arguments
            times = low if high is _parser.MAXREPEAT else high
            total += max(1, times) * parts(repeated)
        else:
            total += 1 + sum(parts(inner) for inner in _inside(arguments))
    return total


def _inside(arguments: Any) -> Iterator[Any]:
    """The parsed patterns among an operator's arguments."""
    if isinstance(arguments, _parser.SubPattern):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _inside(argument)


async def pattern_error(pattern: str) -> str:
    """Return why a checked pattern cannot be used; empty when it can."""
    error = await POOL.ask(["error", pattern], _CHILD_PATIENCE)
    if error == "":
        return ""
    return f"not a regular expression: {error or 'compiling it takes too much time or memory'}"


async def matches(pattern: str, text: str) -> bool:
    """Return whether a checked pattern matches the whole text; not when that takes longer than ``PATIENCE``."""
    return await POOL.ask(["matches", pattern, text, PATIENCE], _CHILD_PATIENCE) is True


async def search_last(pattern: str, text: str) -> LastMatch | None:
    """Return the last match of a checked pattern; ``None`` when the search takes longer than ``PATIENCE``."""
    found = await POOL.ask(["last", pattern, text, PATIENCE], _CHILD_PATIENCE)
    return LastMatch(*found) if isinstance(found, list) else None
