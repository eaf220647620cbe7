r"""Sets of real numbers: intervals, unions, inequalities of one variable. Imports sympy, for a child process alone.

``2x<6``, ``x \in (-\infty, 3)`` and ``]-\infty;3[`` are one set. Inequalities of several variables are equal if their
sides differ by a positive factor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sympy import Complement, EmptySet, Eq, FiniteSet, Intersection, Interval, Ne, Reals, S, Set, Union, oo

from reasoner.answers.lists import split_items, strip_brackets

Parse = Callable[[str], Any | None]
"""Function that returns the sympy expression of a formula, or ``None``."""
Same = Callable[[Any, Any], bool]

_RELATION = re.compile(r"\\(?:leqslant|geqslant|leq|geq|neq|le|ge|ne|lt|gt)(?![A-Za-z])|<=|>=|!=|<|>|=")
_OPERATORS = {
    "leqslant": "<=", "leq": "<=", "le": "<=", "geqslant": ">=", "geq": ">=", "ge": ">=", "lt": "<", "gt": ">",
    "neq": "!=", "ne": "!=",
}  # fmt: skip
_MEMBER = re.compile(r"([A-Za-z](?:_\w)?)\s?\\in(?![A-Za-z])\s?")
_JOIN = re.compile(r"\s*,?\s*(?<![A-Za-z\\])(and|or)(?![A-Za-z])\s*|\s*([,;])\s*")
_SET_OPERATOR = re.compile(r"\\(cup|cap|setminus|backslash)(?![A-Za-z])")
_NAMED = {"\\mathbb{R}": Reals, "\\emptyset": EmptySet, "\\{\\}": EmptySet, "\\R": Reals}
MAX_PARTS = 16


@dataclass(frozen=True, slots=True)
class RealSet:
    """A set, and the variable that the answer names."""

    values: Set
    variable: str | None = None


def read_set(text: str, parse: Parse) -> RealSet | None:
    """Return the set that a text describes; ``None`` if it is none of one real variable."""
    member = _MEMBER.match(text)
    variable = member.group(1) if member else None
    text = (text[member.end() :] if member else text).strip()
    found = _read_relations(text, parse) if _RELATION.search(text) else _read_union(text, parse)
    return None if found is None else RealSet(found.values, found.variable or variable)


def are_same_set(a: RealSet, b: RealSet, same: Same) -> bool:
    """Return True if two sets have the same parts, with ends that are the ``same``."""
    if a.variable and b.variable and a.variable != b.variable:
        return False
    ours, theirs = _list_parts(a.values), _list_parts(b.values)
    if ours is None or theirs is None:
        return bool(a.values == b.values)
    return len(ours) == len(theirs) and all(
        (x.left_open, x.right_open) == (y.left_open, y.right_open) and same(x.start, y.start) and same(x.end, y.end)
        for x, y in zip(ours, theirs, strict=True)
    )


def split_relation(text: str) -> tuple[str, str, str] | None:
    """Return the left side, the operator and the right side of a single relation that is no equation."""
    signs = list(_RELATION.finditer(text))
    if len(signs) != 1 or signs[0].group() == "=":
        return None
    return text[: signs[0].start()], _read_operator(signs[0]), text[signs[0].end() :]


def _read_operator(sign: re.Match[str]) -> str:
    return _OPERATORS.get(sign.group().removeprefix("\\"), sign.group())


def _list_parts(values: Set) -> list[Any] | None:
    """Return a set's intervals and points from left to right; ``None`` if it has other parts."""
    parts: list[Any] = []
    for part in values.args if isinstance(values, Union) else [values]:
        if part is EmptySet or part == S.EmptySet:
            continue
        if part == Reals:
            parts.append(Interval(-oo, oo))
        elif isinstance(part, FiniteSet):
            parts += [_Point(value) for value in part.args]
        elif isinstance(part, Interval):
            parts.append(part)
        else:
            return None
    return sorted(parts, key=lambda part: (float(part.start.evalf()), float(part.end.evalf())))


@dataclass(frozen=True, slots=True)
class _Point:
    start: Any
    left_open: bool = False
    right_open: bool = False

    @property
    def end(self) -> Any:
        return self.start


# Relations


def _read_relations(text: str, parse: Parse) -> RealSet | None:
    """Return the set of "x < 1 or x > 3". A list of relations holds together if it can, else each of them alone."""
    pieces = _JOIN.split(text)
    if len(pieces) > 3 * MAX_PARTS:
        return None
    sets = [_read_chain(piece, parse) for piece in pieces[::3]]
    joins = {word or sign for word, sign in zip(pieces[1::3], pieces[2::3], strict=True)} - {None}
    if any(one is None for one in sets) or len(joins) > 1:
        return None
    known = [one for one in sets if one is not None]
    variables = {one.variable for one in known}
    if len(variables) != 1:
        return None
    values = [one.values for one in known]
    union, intersection = Union(*values), Intersection(*values)
    together = joins <= {"and"} or (joins != {"or"} and intersection != S.EmptySet)
    return RealSet(intersection if together else union, variables.pop())


def _read_chain(text: str, parse: Parse) -> RealSet | None:
    """Return the set of a chain such as "0 < 2x < 6"."""
    signs = list(_RELATION.finditer(text))
    if not 1 <= len(signs) <= 3:
        return None
    bounds = [0, *(index for sign in signs for index in sign.span()), len(text)]
    sides = [parse(text[start:end].strip()) for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    if any(side is None for side in sides):
        return None
    symbols = set().union(*(side.free_symbols for side in sides if side is not None))
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    triples = zip(sides, map(_read_operator, signs), sides[1:], strict=False)
    relations = [_relate(left, operator, right) for left, operator, right in triples]
    values = [Reals if one == True else S.EmptySet if one == False else one.as_set() for one in relations]  # noqa: E712
    return RealSet(Intersection(*values), symbol.name)


def _relate(left: Any, operator: str, right: Any) -> Any:
    match operator:
        case "<":
            return left < right
        case ">":
            return left > right
        case "<=":
            return left <= right
        case ">=":
            return left >= right
        case "!=":
            return Ne(left, right)
    return Eq(left, right)


# Intervals


def _read_union(text: str, parse: Parse) -> RealSet | None:
    """Return the set of intervals and sets joined by signs, from left to right."""
    pieces = _SET_OPERATOR.split(text)
    if len(pieces) > 2 * MAX_PARTS:
        return None
    total: Any = None
    for operator, piece in zip([None, *pieces[1::2]], pieces[::2], strict=True):
        part = _read_part(piece.strip(), parse)
        if part is None:
            return None
        match operator:
            case None:
                total = part
            case "cup":
                total = Union(total, part)
            case "cap":
                total = Intersection(total, part)
            case _:
                total = Complement(total, part)
    return RealSet(total)


def _read_part(text: str, parse: Parse) -> Set | None:
    if text in _NAMED:
        return _NAMED[text]
    kind, inner = strip_brackets(text)
    items = split_items(inner) or ()
    if kind == "{}":
        values = [parse(item) for item in items]
        return None if any(value is None or value.free_symbols for value in values) else FiniteSet(*values)
    if not kind or len(items) != 2:
        return None
    start, end = (parse(item) for item in items)
    if start is None or end is None or start.free_symbols or end.free_symbols or not start.is_extended_real:
        return None
    return Interval(start, end, kind[0] == "(", kind[1] == ")") if end.is_extended_real else None
