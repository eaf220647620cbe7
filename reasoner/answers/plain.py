r"""Answers that need no algebra: numbers with units, lists of numbers, dates and the like, words and arithmetic.

Ignored in comparisons: the form of a number (7, 7.0, 14/2, 3 1/2, ``3\frac{1}{2}``, 1.6e-19, ``0.\overline{3}``), the
unit or counted noun that one of the two lacks (``reasoner.answers.notation.units``), and a name that one lacks (x = 5
equals 5, but not y = 5). 50% equals both 50 and 1/2. Lists are sets (1, 2 equals 2, 1) by default; a tuple is ordered
and equals a list in the same order. Words are compared by their letters, ignoring case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from reasoner.answers import arithmetic
from reasoner.answers.lists import are_equal_lists, split_items, strip_brackets
from reasoner.answers.normalize import MAX_CHARS, normalize
from reasoner.answers.notation.codes import read_code
from reasoner.answers.notation.units import NO_UNIT
from reasoner.answers.notation.units import count_details as count_unit_details
from reasoner.answers.numbers import (
    WORD,
    Number,
    are_same_number,
    have_same_name,
    read_compound,
    read_number,
    split_name,
    split_unit,
    take_result,
)

MAX_ITEMS = 100
_FUNCTIONS = frozenset(
    ("and", "or", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "lim", "max", "min", "mod",
     "gcd", "lcm", "det", "for", "all", "frac", "pi", "infty", "cup", "cap", "pmod")
)  # fmt: skip
_LETTERS = re.compile(r"[^\W\d_](?:[^\W\d_]|[ '.,-])*[^\W\d_.]")
_COMMAND = re.compile(r"\\(?:begin|end)\{[A-Za-z*]+\}|\\[A-Za-z]+")
_GROUPED_DIGITS = re.compile(r"(?<=\d),(?=0\d\d(?!\d))")
"""Comma before a group of digits that begins with 0, which is no item of its own."""


_SAME_WORDS = {"no solutions": "no solution"}


@dataclass(frozen=True, slots=True)
class Items:
    """A list of numbers. ``kind``: the brackets around it, or none."""

    kind: str
    items: tuple[Number, ...]
    name: str = ""

    def __str__(self) -> str:
        opening, closing = ("\\{", "\\}") if self.kind == "{}" else (self.kind[:1], self.kind[1:])
        name = f"{self.name}=" if self.name else ""
        return name + opening + ("," if self.kind else ", ").join(map(str, self.items)) + closing


@dataclass(frozen=True, slots=True)
class Words:
    """Text without mathematics."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Code:
    """A date, a time or a number in groups (``reasoner.answers.notation.codes``)."""

    text: str

    def __str__(self) -> str:
        return self.text


Plain = Number | Items | Words | Code


@lru_cache(maxsize=4096)
def parse_plain(answer: str) -> Plain | None:
    """Parse an answer as a number, list or words; ``None`` if it is a formula or too long."""
    if len(answer) > MAX_CHARS:
        return None
    text = normalize(answer)
    code = read_code(split_name(text)[1])
    if code is not None:
        return Code(code)
    text = take_result(text)
    return read_number(text) or read_compound(text) or _parse_items(text) or _parse_words(text)


def parse_number(answer: str) -> Fraction | None:
    """Return the exact value of a number, ignoring its unit; ``None`` for a formula, a list or words."""
    plain = parse_plain(answer)
    return plain.value if isinstance(plain, Number) and not plain.base else None


def _parse_items(text: str) -> Items | Number | None:
    """Parse a list of numbers, with or without brackets."""
    name, rest = split_name(text)
    if rest.startswith("\\pm") or "\\pm" in rest:
        front, _, back = rest.partition("\\pm")
        number = read_number(back.strip())
        if front.strip() or number is None or number.name:
            return None
        return Items("", (number, Number(-number.value, number.unit, number.percent)), name)
    kind, inner = strip_brackets(rest)
    if set(inner) & set("()[]{}"):
        kind, inner = "", rest
    parts = split_items(_GROUPED_DIGITS.sub("", inner) if kind else inner)
    if parts is None or len(parts) > MAX_ITEMS or (len(parts) < 2 and kind != "{}"):
        return None
    items = []
    for part in parts:
        item = read_number(part, alone=not kind)
        if item is None:
            return None
        items.append(item)
    return Items(kind, tuple(items), name)


def _parse_words(text: str) -> Words | None:
    """Parse text that is mostly words; a single letter is a variable."""
    if _LETTERS.fullmatch(text):
        return Words(text)
    bare = _COMMAND.sub(" ", text)
    long = [word for word in WORD.findall(bare) if len(word) >= 3 and word.lower() not in _FUNCTIONS]
    return Words(text) if len(long) >= 2 or "\u2015" in text else None


def decide_equal(a: str, b: str) -> bool | None:
    """Return True if two answers are equal; ``None`` if algebra has to decide. Prose equals only prose."""
    ours, theirs = parse_plain(a), parse_plain(b)
    if ours is not None and theirs is not None:
        return are_same(ours, theirs)
    if isinstance(ours, Code) or isinstance(theirs, Code):
        return False
    first, second = _exact_value(a, ours), _exact_value(b, theirs)
    if first is not None and second is not None:
        return first == second
    prose = next((one for one in (ours, theirs) if isinstance(one, Words)), None)
    return None if prose is None or prose.text.isalpha() else False


def _exact_value(text: str, parsed: Plain | None) -> Fraction | None:
    """Return the value of arithmetic, or of a number that is neither rounded nor has a unit or a name."""
    if parsed is None:
        return arithmetic.evaluate(text)
    return parsed.value if isinstance(parsed, Number) and parsed == Number(parsed.value) else None


def count_details(answer: str) -> int:
    """Return how much an answer says that another may leave out and still be equal: units, names, exact values."""
    parsed = parse_plain(answer)
    numbers = [parsed] if isinstance(parsed, Number) else parsed.items if isinstance(parsed, Items) else ()
    details = sum(
        count_unit_details(one.unit) + bool(one.name) - one.percent - (one.last_place is not None) for one in numbers
    )
    named = isinstance(parsed, Items) and bool(parsed.name)
    return details + named + (parsed is None and ("=" in answer or split_unit(answer)[1] != NO_UNIT))


def differs_plainly(a: str, b: str) -> bool:
    """Return True if two answers differ for certain, without algebra."""
    return decide_equal(a, b) is False


def are_same(a: Plain, b: Plain) -> bool:
    """Return True if two plain answers are equal; symmetric in its arguments."""
    if isinstance(a, Number) and isinstance(b, Number):
        return have_same_name(a.name, b.name) and are_same_number(a, b)
    if isinstance(a, Items) and isinstance(b, Items):
        return _same_items(a, b)
    if isinstance(a, Words) and isinstance(b, Words):
        return _fold_letters(a.text) == _fold_letters(b.text)
    if isinstance(a, Code) and isinstance(b, Code):
        return a == b
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Items) and isinstance(other, Number) and one.kind == "{}" and len(one.items) == 1:
            return have_same_name(one.name, other.name) and are_same_number(one.items[0], other)
    return False


def _fold_letters(text: str) -> str:
    letters = " ".join(text.casefold().replace(",", " ").split()).strip(" .")
    return _SAME_WORDS.get(letters, letters)


def _same_items(a: Items, b: Items) -> bool:
    if not have_same_name(a.name, b.name):
        return False
    names = [{item.name for item in side.items} - {""} for side in (a, b)]
    is_ordered = not all(names) and len(names[0] | names[1]) > 1  # values stand for names in their order
    return are_equal_lists((a.kind, b.kind), a.items, b.items, are_same, is_ordered=is_ordered)
