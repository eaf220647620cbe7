"""Worker process of ``reasoner.regex``: compiles and matches clients' regular expressions.

The package ``regex`` observes a timeout while it backtracks, so that a late search does not cost the process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import regex

from reasoner.subprocess_worker import serve

MEMORY_BYTES = 512 << 20


@lru_cache(maxsize=16)
def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """Return the compiled pattern. The package's own cache is disabled: it would hold hundreds."""
    return regex.compile(pattern, cache_pattern=False)


def handle(request: list[Any]) -> Any:
    """Handle one request about a pattern. A late search raises ``TimeoutError``, to which ``serve`` replies ``False``.

    ``["error", pattern]``: why it cannot be compiled, or an empty string. ``["matches", pattern, text, seconds]``: True
    if it matches all of the text. ``["last", pattern, text, seconds]``: the first group of its last match and the end
    of that match, both ``None`` without a match.
    """
    operation, pattern, *rest = request
    if operation == "error":
        try:
            compile_pattern(pattern)
        except (regex.error, OverflowError, RecursionError) as error:
            return str(error) or type(error).__name__
        return ""
    text, seconds = rest
    if operation == "matches":
        return compile_pattern(pattern).fullmatch(text, timeout=seconds) is not None
    last = None
    for match in compile_pattern(pattern).finditer(text, timeout=seconds):
        last = match
    return [None, None] if last is None else [last.group(1), last.end()]


if __name__ == "__main__":
    serve(handle, MEMORY_BYTES)
