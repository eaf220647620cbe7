"""Flexible extraction: the last number or choice letter of a finished solution that states no answer."""

from __future__ import annotations

import re
from collections import deque

from reasoner.answers import plain
from reasoner.answers.normalize import WIDE
from reasoner.answers.numbers import Number

MAX_TRIES = 32
"""Maximum number of numbers that are examined, from the end of the text."""

_LATIN = r"[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
"""Pattern of a letter or digit; letters of scripts that write numbers without spaces are none."""
_NUMBER = re.compile(
    rf"(?<!{_LATIN})(?<![\^{{}}\\./:])(?<!\d,)(?:(?<!{_LATIN})(?<![)\]}}])(?<![\d)\]}}]\s)[-\u2212])?\\?[$€£¥₹]?"
    r"(?:\\[dt]?frac\{\d{1,9}\}\{\d{1,9}\}|(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?(?:/\d{1,20})?|\.\d{1,40})"
    rf"(?:\s?\\?%)?(?!(?!(?!st|nd|rd|th)[a-z]{{2,4}}\b){_LATIN}|[/^_({{:]|[.,]\d)"
)
_LABEL = re.compile(
    r"(?:^[\s>*_#(\[-]{0,10}|\b(?:step|equation|part|case|question|problem|example|option|method|figure)\s|\u7b2c\s?)"
    r"[(\[]?$",
    re.IGNORECASE | re.MULTILINE,
)
"""Pattern of the text before a number that counts lines or steps."""
_LABEL_END = re.compile(r"[.)\]:](?=[\s*_])")
_LETTER = re.compile(
    r"\((?P<parens>[A-J])\)|\b[Oo]ption\s(?P<option>[A-J])\b|(?<![\w'\u2019.-])(?P<closed>[A-J])(?=\)|\*\*|[.:](?:\s|$))"
    r"|(?<![\w'\u2019.-])(?P<bare>[B-HJ])(?![\w'\u2019-])"
)


def find_last_number(text: str) -> str | None:
    """Return the last number of a text with its sign, currency and percent sign; labels such as "3." are no numbers."""
    text = text if text.isascii() else text.translate(WIDE)
    for match in reversed(deque(_NUMBER.finditer(text), MAX_TRIES)):
        before = text[max(0, match.start() - 40) : match.start()].rpartition("\n")[2]
        is_at_line_start = not before.strip(" >*_#([-")
        is_label = _LABEL.search(before) and (not is_at_line_start or _LABEL_END.match(text, match.end()))
        if not is_label and isinstance(plain.parse_plain(match.group()), Number):
            return match.group()
    return None


def find_last_choice(text: str) -> str | None:
    """Return the last choice letter of a text, A to J: one in parentheses, closed like a label, or alone.

    "A" and "I" alone are words.
    """
    text = text if text.isascii() else text.translate(WIDE)
    last = deque(_LETTER.finditer(text), 1)
    return next(letter for letter in last[0].groups() if letter) if last else None
