"""The blocking client, written from the one for asyncio by replacing what belongs to asyncio."""

from __future__ import annotations

import re

_NOTICE = '"""The blocking client. Written by `make docs` from ``_async_client.py``: change it there."""\n'
_REPLACED = {
    r'\A""".*?"""\n': _NOTICE,
    r" for asyncio\b": "",
    r"\basyncio\.sleep\b": "time.sleep",
    r"\bimport asyncio\nimport contextlib\n": "import contextlib\nimport time\n",
    r"\bas an async context": "as a context",
    r"\basync (?=def|with|for)": "",
    r"\bawait ": "",
    r"\bAsync(?=Client|Iterator|BaseTransport)": "",
    r"\b__a(?=enter__|exit__)": "__",
    r"\basynccontextmanager\b": "contextmanager",
    r"\.a(?=close\(|read\(|iter_lines\(|iter_bytes\()": ".",
    r"\bIterator, Callable\b": "Callable, Iterator",
    r"\bfor (line|part) in (\S+):\n +yield \1\n": r"yield from \2\n",
}
"""Expressions and what they become, in this order."""


def make_blocking(source: str) -> str:
    """Return the source of the blocking client for that of the client for asyncio."""
    for expression, replacement in _REPLACED.items():
        source = re.sub(expression, replacement, source, flags=re.DOTALL)
    return source
