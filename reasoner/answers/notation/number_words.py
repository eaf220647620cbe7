"""Numbers in English words: "negative five", "twenty-one", "two and a half", "three quarters"."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import takewhile

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_VALUES = {word: value for value, word in enumerate(_SMALL)} | {word: 10 * ten for ten, word in enumerate(_TENS, 2)}
_LARGE = {"thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9, "trillion": 12, "quadrillion": 15}
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000, "millionth": 10**6,
}  # fmt: skip
_SIGNS = re.compile(r"(negative|minus|positive|plus)\s+", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+")
_LINK = re.compile(r"\s*-\s*|\s+")
_FIRST = frozenset((*_VALUES, *_LARGE, *_PARTS, "hundred", "a", "an", "dozen"))
MAX_WORDS = 24


def replace_words(text: str) -> str:
    """Return the text with the sign and number that it begins with in digits; unchanged if it begins with none."""
    found = find_number(text)
    return text if found is None else found[0] + text[found[1] :]


def find_number(text: str) -> tuple[str, int] | None:
    """Return the sign and number with which a text begins, in digits, and where its words end; ``None`` for none.

    Before digits the sign alone is in words: "negative 5".
    """
    sign = _SIGNS.match(text)
    start = sign.end() if sign else 0
    minus = "-" if sign and sign.group(1).lower() in ("negative", "minus") else ""
    if sign and re.match(r"[\d.$€£¥₹\\(]", text[start:]):
        return minus, start
    words = _split(text[start:])
    value, count = _read_number(tuple(word for word, _ in words))
    if not count or (count < len(words) and words[count][0] in _FIRST - {"a", "an"}):  # "five five" is no number
        return None
    return f"{minus}{value}", start + words[count - 1][1]


def _split(text: str) -> list[tuple[str, int]]:
    """Return the words at the beginning of a text that are joined by spaces and hyphens, each with its end."""
    words: list[tuple[str, int]] = []
    at = 0
    while len(words) < MAX_WORDS and (word := _WORD.match(text, at)):
        words.append((word.group().lower(), word.end()))
        link = _LINK.match(text, word.end())
        if link is None:
            break
        at = link.end()
    return words


def _read_number(words: tuple[str, ...]) -> tuple[Fraction, int]:
    """Return the number and how many words it has; no word if they begin with none."""
    if not words or words[0] not in _FIRST:
        return Fraction(0), 0
    whole, at = _read_whole(words, 0)
    if at == 0 and words[0] in ("a", "an") and len(words) > 1 and words[1] in (*_PARTS, "dozen", "hundred", *_LARGE):
        whole, at = 1, 1
        if words[1] in _LARGE or words[1] == "hundred":
            whole, at = _read_whole(("one", *words[1:]), 0)
    if at == 0:
        alone = {"half": Fraction(1, 2), "dozen": Fraction(12)}.get(words[0])
        return (Fraction(0), 0) if alone is None else (alone, 1)
    if words[at : at + 1] == ("dozen",) or words[at : at + 1] == ("dozens",):
        return Fraction(12 * whole), at + 1
    if parts := _find_parts(words, at, whole):
        return Fraction(whole, parts), at + 1
    if words[at : at + 1] == ("and",):  # two and a half
        top, end = (1, at + 2) if words[at + 1 : at + 2] in (("a",), ("an",)) else _read_whole(words, at + 1)
        if end > at + 1 and (parts := _find_parts(words, end, top)):
            return whole + Fraction(top, parts), end + 1
    if words[at : at + 1] == ("point",):
        digits = "".join(str(_VALUES[word]) for word in takewhile(_SMALL[:10].__contains__, words[at + 1 :]))
        if digits:
            return Fraction(f"{whole}.{digits}"), at + 1 + len(digits)
    return Fraction(whole), at


def _find_parts(words: tuple[str, ...], at: int, top: int) -> int | None:
    """Return the denominator of "one half" or "three quarters"; "twenty-third" is no fraction."""
    if at >= len(words):
        return None
    return _PARTS.get(words[at] if top == 1 else words[at].removesuffix("s") if words[at].endswith("s") else "")


def _read_whole(words: tuple[str, ...], at: int) -> tuple[int, int]:
    """Return the whole number at an index and the index after it; the same index for none."""
    total = group = 0
    end = at
    index = at
    while index < len(words):
        word = words[index]
        if word in _VALUES:
            value = _VALUES[word]
            fits = group % 100 == 0 or (value < 10 and group % 100 >= 20 and group % 10 == 0)
            if not fits or (end > at and value == 0) or (group % 100 and value == 0):
                break
            group += value
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word in _LARGE and group:
            total, group = total + group * 10 ** _LARGE[word], 0
        elif word == "and" and end > at and words[end - 1] in ("hundred", *_LARGE):
            index += 1
            continue
        else:
            break
        index += 1
        end = index
    return total + group, end
