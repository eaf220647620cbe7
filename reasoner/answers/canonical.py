"""Canonical forms of answers: most equal answers have equal forms, so that few comparisons need algebra."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from functools import lru_cache

from reasoner.answers import arithmetic
from reasoner.answers.normalize import normalize, simplify_characters, strip_text_command
from reasoner.answers.numbers import split_unit
from reasoner.answers.plain import parse_plain
from reasoner.answers.spec import Compare

_PLAIN_NUMBER = re.compile(r"[+-]?(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:\s?/\s?(\d+))?")
_SPACES = re.compile(r"\s+")
_FREE_SPACE = re.compile(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])|(?<=\d) (?=[A-Za-z])|(?<![A-Za-z])(?<=[A-Za-z]) (?=\d)")
_LETTER_ALONE = re.compile(r"[(\[]\s?([A-Za-z])\s?[)\]]")
_CHOICE = re.compile(r"(?<![A-Za-z\\])[A-Ja-j](?![A-Za-z])")
_MAX_DIGITS = 1000
"""Maximum number of digits of a number; longer ones are compared as text, since arithmetic takes quadratic time."""


@lru_cache(maxsize=4096)
def canonicalize(answer: str, compare: Compare = "math") -> str:
    """Return the canonical form of the answer: most equal answers have equal forms, and different answers never do.

    ``math``: numbers, lists of numbers and units as ``reasoner.answers.plain`` formats them, and formulas without
    typesetting commands. ``text``: plain numbers (7, 7.0, 14/2, $7$, 1,000) have one form, and other text loses its
    white space except between two digits. A choice is its letter, and code its lines. JSON has its keys in order, and
    one form for equal numbers (1, 1.0, 1e0).
    """
    if compare == "code":
        return "\n".join(line.rstrip() for line in answer.strip("\n").splitlines() if line.strip())
    if compare == "json":
        return canonicalize_json(answer)
    if compare == "choice":
        letter = _CHOICE.search(simplify_characters(answer))
        return letter.group().upper() if letter else answer.strip().casefold()
    if compare == "text":
        return _normalize_text(answer)
    plain = parse_plain(answer)
    if plain is not None:
        form = str(plain)
        if len(form) <= _MAX_DIGITS:
            return form
    normal = normalize(answer)
    value = arithmetic.evaluate(normal)
    if value is not None:
        return str(value)
    text, unit = split_unit(normal)
    text = _FREE_SPACE.sub("", text)
    letter = _LETTER_ALONE.fullmatch(text)
    return letter.group(1) if letter else f"{text} {unit}".rstrip()


def canonicalize_json(text: str) -> str:
    """Return the JSON text that all texts of an equal value share; what is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(text, parse_float=_parse_number, parse_constant=str), sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _parse_number(digits: str) -> float | int:
    number = float(digits)
    return int(number) if number.is_integer() else number


def _normalize_text(answer: str) -> str:
    bare = _SPACES.sub(" ", strip_text_command(answer).replace("$", "")).strip().rstrip(".")
    number = _PLAIN_NUMBER.fullmatch(bare) if len(bare) <= _MAX_DIGITS else None
    if number is not None and (number.group(1) is None or int(number.group(1))):
        top, _, bottom = bare.replace(",", "").partition("/")
        return str(Fraction(top.strip()) / Fraction(bottom.strip() or "1"))
    return re.sub(r"(?<!\d) | (?!\d)", "", bare)
