"""The child of ``reasoner.regex``: compiles clients' regular expressions and matches them.

The package ``regex`` looks at the clock while it backtracks, so that a search that is late costs no process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import regex

from reasoner.subprocess_worker import serve

MEMORY_BYTES = 512 << 20


@lru_cache(maxsize=16)
def compiled(pattern: str) -> regex.Pattern[str]:
    """Return the pattern, compiled. The package's own cache would hold hundreds of them."""
    return regex.compile(pattern, cache_pattern=False)


def answer(question: list[Any]) -> Any:
    """Answer one of three questions about a pattern; ``False`` (``serve``) for a search that is late.

    ``["error", pattern]``: why it cannot be compiled, or an empty text. ``["matches", pattern, text, seconds]``: if it
    matches all of the text. ``["last", pattern, text, seconds]``: the first group of its last match, and where that
    match ends; both ``None`` without one.
    """
    what, pattern, *rest = question
    if what == "error":
        try:
            compiled(pattern)
        except (regex.error, OverflowError, RecursionError) as error:
            return str(error) or type(error).__name__
        return ""
    text, seconds = rest
    if what == "matches":
        return compiled(pattern).fullmatch(text, timeout=seconds) is not None
    last = None
    for match in compiled(pattern).finditer(text, timeout=seconds):
        last = match
    return [None, None] if last is None else [last.group(1), last.end()]


if __name__ == "__main__":
    serve(answer, MEMORY_BYTES)
