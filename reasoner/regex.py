"""Regular expressions from clients: parsed when submitted, compiled and matched in a worker process with limits.

A pattern is in the syntax of Python's ``re``. It is matched by the package ``regex``, which expands counted repetitions
when it compiles; the expanded size is bounded first, from the parse alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined,unused-ignore]  # in typeshed only if something loads it
from typing import Any

from reasoner.subprocess_pool import WorkerPool

MAX_CHARS = 1000
MAX_PARTS = 20_000
"""Maximum number of parts of a pattern after its counted repetitions are expanded."""
CPU_SECONDS = 1.0
"""Maximum time of matching in one text. A search that takes longer has found nothing."""
_WORKER_CPU_SECONDS = 2.0 * CPU_SECONDS
"""Processor time of one request: it includes compiling, and not all of matching observes its time limit."""
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)

POOL = WorkerPool("reasoner.regex_worker")


@dataclass(frozen=True, slots=True)
class LastMatch:
    """First group of a pattern's last match, and the end of that match; both ``None`` without a match."""

    group: str | None
    end: int | None


def check_pattern(pattern: str, *, groups: int | None = None) -> str:
    """Return the pattern itself. Raises ``ValueError`` for an invalid one, or one without exactly ``groups`` groups.

    The pattern is parsed but not compiled, which may take far longer.
    """
    if len(pattern) > MAX_CHARS:
        raise ValueError(f"the pattern has {len(pattern)} characters; at most {MAX_CHARS} are allowed")
    try:
        tree = _parser.parse(pattern)
        size = count_parts(tree)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if size > MAX_PARTS:
        raise ValueError(
            f"the counts in braces multiply to more than {MAX_PARTS} parts: expanded, this pattern has {size}; use "
            "smaller counts, or * and + for long repetitions"
        )
    num_groups = tree.state.groups - 1
    if groups is not None and num_groups != groups:
        raise ValueError(f"the pattern has {num_groups} groups; it needs {groups}: write (?:…) for the others")
    return pattern


def count_parts(tree: Any) -> int:
    """Return the number of characters, sets and references of a parsed pattern with counted repetitions expanded.

    ``tree`` is the result of ``re``'s own parser: lists of (operator, arguments).
    """
    total = 0
    for operator, arguments in tree:
        if operator in _REPEATS:
            low, high, repeated = arguments
            count = low if high is _parser.MAXREPEAT else high
            total += max(1, count) * count_parts(repeated)
        else:
            total += 1 + sum(count_parts(inner) for inner in _iterate_subpatterns(arguments))
    return total


def _iterate_subpatterns(arguments: Any) -> Iterator[Any]:
    """Yield the parsed patterns among an operator's arguments."""
    if isinstance(arguments, _parser.SubPattern):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _iterate_subpatterns(argument)


async def find_pattern_error(pattern: str) -> str:
    """Return why a checked pattern cannot be compiled, or an empty string."""
    error = await POOL.call(["error", pattern], _WORKER_CPU_SECONDS)
    if error == "":
        return ""
    return f"not a regular expression: {error or 'compiling it takes too much time or memory'}"


async def matches_fully(pattern: str, text: str) -> bool:
    """Return True if a checked pattern matches the whole text within ``CPU_SECONDS``."""
    return await POOL.call(["matches", pattern, text, CPU_SECONDS], _WORKER_CPU_SECONDS) is True


async def search_last(pattern: str, text: str) -> LastMatch | None:
    """Return the last match of a checked pattern; ``None`` if the search takes longer than ``CPU_SECONDS``."""
    match = await POOL.call(["last", pattern, text, CPU_SECONDS], _WORKER_CPU_SECONDS)
    return LastMatch(*match) if isinstance(match, list) else None
