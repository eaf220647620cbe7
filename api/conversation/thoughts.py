"""Thoughts in what a client sends back."""

from __future__ import annotations

from engine.protocol.thoughts import DELIMITERS


def strip_thoughts(text: str) -> str:
    """Return an assistant's text without the thoughts at its beginning, which a model does not see again.

    Some clients write what they got as ``reasoning_content`` there, in the delimiters of a thought.
    """
    rest = text.lstrip()
    for opening, closing in DELIMITERS:
        if rest.startswith(opening) and closing in rest:
            return strip_thoughts(rest.partition(closing)[2].lstrip())
    return text
