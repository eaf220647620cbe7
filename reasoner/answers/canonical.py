"""A form in which most equal answers are equal strings, so that few of them need algebra."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from reasoner.answer_spec import Compare

_PLAIN_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(/\d+)?")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(\D|$))")
_TYPESETTING = re.compile(r"\\[,;!:]|\\left(?=[(\[|\\])|\\right(?=[)\]|\\])")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}\\]*)\}")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_FRACTION_SIGN = re.compile(r"(?<!\d)[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_MAX_DIGITS = 1000
"""Longer numbers are compared as text: arithmetic on them takes time that grows with their square."""


@lru_cache(maxsize=4096)
def canonical(answer: str, compare: Compare = "math") -> str:
    """Equal plain numbers are equal strings (7, 7.0, 14/2, $7$, 1,000), for ``math`` and ``text``; everything else
    loses its white space and, for ``math``, how it is typeset. A choice is its letter, and code its lines."""
    if compare == "code":
        return "\n".join(line.rstrip() for line in answer.strip("\n").splitlines() if line.strip())
    if compare == "choice":
        letter = re.search(r"(?<![A-Za-z\\])[A-Ja-j](?![A-Za-z])", answer)
        return letter.group().upper() if letter else answer.strip().casefold()
    bare = re.sub(r"\s+|\$", "", answer).rstrip(".")
    if compare == "math":
        bare = _TYPESETTING.sub("", bare)
        words = _WORDS.fullmatch(bare)
        bare = _plain_characters(words.group(1) if words else bare)
    number = _THOUSANDS.sub("", bare)
    if len(number) <= _MAX_DIGITS and _PLAIN_NUMBER.fullmatch(number) and not re.fullmatch(r".*/0+", number):
        top, _, bottom = number.partition("/")
        return str(Fraction(top) / Fraction(bottom or "1"))
    return bare


def _plain_characters(text: str) -> str:
    """Full-width and other shapes of ASCII characters, minus signs, and Unicode's powers and fractions as LaTeX."""
    if text.isascii():
        return text
    text = _SUPERSCRIPTS.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match.group()) + "}", text)
    text = _FRACTION_SIGN.sub(lambda match: unicodedata.normalize("NFKC", match.group()).replace("\u2044", "/"), text)
    text = "".join(
        unicodedata.normalize("NFKC", char) if unicodedata.decomposition(char).startswith("<wide>") else char
        for char in text
    )
    return text.replace("\u2212", "-")
