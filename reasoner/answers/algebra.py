r"""Symbolic equality of two formulas. Imports sympy, so only a child process may import this module.

Rules: two equations are equal if lhs - rhs agree up to a constant factor. An equation equals an expression only if its
left side is a name, as in ``x = \sqrt{2}``. Values are compared exactly, unless one of the two is a long decimal. Lists
of formulas are compared element by element, as sets within braces or without brackets, and else in order. Sets of reals
are compared by their ends (``reasoner.answers.inequalities``). math-verify, which decides what is left, must give the
same result for both argument orders, except for a relation compared with a set.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from latex2sympy2_extended.logic import And
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, Float, I, Integral, Limit, Product, Rational, Set, Sum, Symbol, Tuple, UnevaluatedExpr
from sympy.core.relational import Relational

from reasoner.answers import numbers, plain
from reasoner.answers.inequalities import are_same_set, read_set, split_relation
from reasoner.answers.lists import are_equal_lists, split_items, strip_brackets
from reasoner.answers.notation.units import are_same_amount

EXACT = 1e-9
"""Relative difference up to which two values are compared to ``MAX_DIGITS`` digits, by their difference."""
MAX_DIGITS = 400
"""Maximum number of digits to which a difference is computed; one that is zero to so many is zero."""
ROUNDED = 1e-5
"""Maximum relative tolerance if one of the values is a long decimal."""
MAX_ITEMS = 50
_UNITS_ARE_READ = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
)
_LATEX = [LatexExtractionConfig(normalization_config=_UNITS_ARE_READ)]  # ExprExtractionConfig evaluates text as Python
_COSTLY = (UnevaluatedExpr, Sum, Integral, Limit, Product)
_POSITIVE = (Rational(12345, 10000), Rational(7071, 10000)), (Rational(3719, 10000), Rational(5503, 10000))
_NEGATIVE = (Rational(-21237, 10000), Rational(6067, 10000))
_MEMBER = re.compile(r"[A-Za-z](?:_\w)?\s?\\in(?![A-Za-z])\s?")
_OPERATORS = re.compile(r"[+\-*/^<>]|\\(?:times|cdot|le|ge|leq|geq|ne|neq|pm|int|sum)(?![A-Za-z])|\d(?![\w}]*\})")
_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|\w)")
_APPROX = re.compile(r"(?<=[\w})])\s*\\approx.*")
_COMPARES = re.compile(r"[<>]|\\(?:le|ge|leq|geq|lt|gt|ne|neq|leqslant|geqslant)(?![A-Za-z])")
_LONG_DECIMAL = re.compile(rf"\.\d{{{numbers.ROUNDED_DIGITS},}}")


def are_equal(a: str, b: str) -> bool:
    """Return True if two canonical answers are mathematically equal; symmetric in its arguments."""
    decided = plain.decide_equal(a, b)
    if decided is not None:
        return decided
    a, unit = numbers.split_unit(a)
    b, other = numbers.split_unit(b)
    if not are_same_amount(Fraction(1), unit, Fraction(1), other):
        return False
    if any(_COMPARES.search(side) or _is_set(side) for side in (a, b)):
        decided = _equal_sets(a, b)
        if decided is not None:
            return decided
    return _equal_lists(a, b) if _is_list(a) or _is_list(b) else _equal_formulas(a, b)


# Sets and inequalities


def _is_set(text: str) -> bool:
    return re.search(r"\\(?:cup|cap|setminus|mathbb|emptyset)(?![A-Za-z])|^\\\{\\\}$", text) is not None


def _equal_sets(a: str, b: str) -> bool | None:
    """Compare two sets of reals, or two inequalities of several variables; ``None`` if they are others."""
    ours, theirs = read_set(a, _parse_one), read_set(b, _parse_one)
    if ours is not None and theirs is not None:
        return are_same_set(ours, theirs, lambda x, y: x == y or _same_values(x, y) is True)
    relations = split_relation(a), split_relation(b)
    if relations[0] is None or relations[1] is None:
        return None
    sides = [_move_left(*relation) for relation in relations if relation is not None]
    if sides[0] is None or sides[1] is None or sides[0][0] != sides[1][0]:
        return None
    factor = _find_factor(sides[0][1], sides[1][1])
    return factor is not None and (factor > 0 or sides[0][0] == "!=")


def _move_left(left: str, operator: str, right: str) -> tuple[str, Any] | None:
    """Return "<", "<=" or "!=" and the difference that is so compared with zero."""
    first, second = _parse_one(left.strip()), _parse_one(right.strip())
    if first is None or second is None:
        return None
    return operator.replace(">", "<"), second - first if ">" in operator else first - second


def _parse_one(text: str) -> Any | None:
    return _one_expression(_parse_answer(text)) if text else None


# Several formulas


def _is_list(text: str) -> bool:
    return split_list(text) is not None


@lru_cache(maxsize=1024)
def split_list(text: str) -> tuple[str, tuple[str, ...]] | None:
    r"""Return the brackets and elements of a list of formulas; ``None`` for one formula. ``A \pm B`` counts as two."""
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    equation = re.fullmatch(r"(\([A-Za-z](?:,[A-Za-z])+\)|[A-Za-z])=(.*)", text)
    if equation is not None and "=" not in equation.group(2):
        text = equation.group(2)
    if text.count("\\pm") == 1 and "," not in text:
        return "", (text.replace("\\pm", "+"), text.replace("\\pm", "-"))
    kind, inner = strip_brackets(text)
    items = split_items(inner)
    if items is None or len(items) < 2 or "" in items or (not kind and len(items) > MAX_ITEMS):
        return None
    return kind, items


def _equal_lists(a: str, b: str) -> bool:
    ours, theirs = split_list(a), split_list(b)
    if ours is None or theirs is None:
        compared = (_COMPARES.search(a) or _COMPARES.search(b)) is not None
        if not (compared or _is_odd(a) or _is_odd(b)):
            return False
        return _verify(_without_member(a, b), _without_member(b, a))
    return are_equal_lists((ours[0], theirs[0]), ours[1], theirs[1], are_equal)


def _is_odd(text: str) -> bool:
    """Return True for sets and matrices, which math-verify compares."""
    return re.search(r"\\(?:cup|cap|setminus|begin|mathbb|emptyset)(?![A-Za-z])", text) is not None


# Two formulas


def _equal_formulas(a: str, b: str) -> bool:
    if not _COMPARES.search(a) and not _COMPARES.search(b):
        ours, theirs = _split_sides(a), _split_sides(b)
        if ours and theirs:
            return _equal_equations(ours, theirs)
        for equation, other in ((ours, b), (theirs, a)):
            if equation:
                return _is_name(equation[0]) and are_equal(equation[1], other)
    a, b = _without_member(a, b), _without_member(b, a)
    return _equal_expressions(_parse_answer(a), _parse_answer(b), _find_last_place(a, b))


def _find_last_place(a: str, b: str) -> float | None:
    """Return the absolute tolerance, if one of the answers has a long decimal: its last place, if that is all of it."""
    if (_LONG_DECIMAL.search(a) is None) == (_LONG_DECIMAL.search(b) is None):
        return None
    long, other = (a, b) if _LONG_DECIMAL.search(a) else (b, a)
    parsed = plain.parse_plain(long)
    if isinstance(parsed, numbers.Number) and parsed.last_place is not None:
        return float(parsed.last_place)
    return None if re.search(r"\.\d", other) else float("inf")


def _without_member(text: str, other: str) -> str:
    r"""Return S for ``x \in S`` if the other answer is no membership statement."""
    return text if _MEMBER.match(other) else _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text


def _split_sides(text: str) -> tuple[str, str] | None:
    """Return the first and the last side of an equation or a chain of equations; ``None`` if there is no equation."""
    if "=" not in text or "\\begin" in text or re.search(r"_\{[^{}]*=", text):
        return None
    sides = _APPROX.sub("", text).split("=")
    return (sides[0].strip(), sides[-1].strip()) if sides[0].strip() and sides[-1].strip() else None


def _is_name(side: str) -> bool:
    """Return True if the left side of an equation is only a name: it has no operator and no number."""
    return not _OPERATORS.search(_SUBSCRIPT.sub("", side)) and re.search(r"[A-Za-z]", side) is not None


def _equal_equations(ours: tuple[str, str], theirs: tuple[str, str]) -> bool:
    if ours[0] == theirs[0]:
        return are_equal(ours[1], theirs[1])
    left, right, other_left, other_right = (_one_expression(_parse_answer(side)) for side in (*ours, *theirs))
    if left is None or right is None or other_left is None or other_right is None:
        return _verify("=".join(ours), "=".join(theirs))
    return _are_proportional(left - right, other_left - other_right)


def _one_expression(parsed: list[Any]) -> Any | None:
    return _unify_symbols(parsed[0]) if parsed and isinstance(parsed[0], Expr) and not parsed[0].has(*_COSTLY) else None


def _are_proportional(f: Any, g: Any) -> bool:
    """Return True if two expressions are equal up to a constant factor, by their values at sample points."""
    return _find_factor(f, g) is not None


def _find_factor(f: Any, g: Any) -> Any | None:
    """Return the number f / g; ``None`` if that depends on the letters."""
    letters = tuple(sorted(f.free_symbols | g.free_symbols, key=str))
    if f.free_symbols != g.free_symbols:
        return None
    factor: Any = None
    reference: Any = None
    for start, step in (*_POSITIVE, _NEGATIVE):
        x, y = (_evaluate(side, letters, start, step) for side in (f, g))
        if x is None or y is None or not x or not y:
            if (x is None) != (y is None) or bool(x) != bool(y):
                return None
            continue
        if reference is None:
            points = {letter: start + step * index for index, letter in enumerate(letters)}
            factor, reference = x / y, f * g.xreplace(points) - g * f.xreplace(points)
        elif abs(x / y - factor) > EXACT * abs(factor) or _evaluate(reference, letters, start, step) != 0:
            return None
    return factor


def _equal_expressions(a: list[Any], b: list[Any], last_place: float | None) -> bool:
    if not a or not b:
        return False
    ours, theirs = _one_expression(a), _one_expression(b)
    if ours is not None and theirs is not None:
        verdict = _same_values(ours, theirs, last_place)
        if verdict is not None:
            return verdict
        return _verify_both_ways([ours], [theirs])
    return _verify_both_ways(a, b)


def _same_values(a: Any, b: Any, last_place: float | None = None) -> bool | None:
    """Compare the values at sample points; ``None`` if that is inconclusive. ``last_place``: absolute tolerance."""
    letters = tuple(sorted(a.free_symbols | b.free_symbols, key=str))
    points = (*_POSITIVE, _NEGATIVE) if letters else _POSITIVE[:1]
    agreed = 0
    for start, step in points:
        x, y = (_evaluate(side, letters, start, step) for side in (a, b))
        if x is None or y is None:
            continue
        largest = max(abs(x), abs(y))
        if last_place is None:
            is_same = bool(abs(x - y) <= EXACT * largest) and _evaluate(a - b, letters, start, step) == 0
        else:
            is_same = bool(abs(x - y) <= min(ROUNDED * largest, last_place))
        agreed += is_same
        if not is_same and (start, step) != _NEGATIVE:
            return False  # elsewhere roots and logarithms may have other branches
    return True if agreed == len(points) else None


@lru_cache(maxsize=4096)
def _evaluate(expression: Any, letters: tuple[Any, ...], start: Any, step: Any) -> Any | None:
    """Return the value at fixed numbers for the letters, ``None`` if it has none; 0 if all its digits cancel."""
    points = {letter: start + step * index for index, letter in enumerate(letters)}
    value = expression.evalf(18, subs=points, maxn=MAX_DIGITS)  # not floats: 10^{10^{10}} is a number here
    if not value.is_number or not value.is_finite:
        return None
    parts = [0 if isinstance(part, Float) and part._prec == 1 else part for part in value.as_real_imag()]
    return parts[0] + I * parts[1] if parts[1] else parts[0]


def _unify_symbols(expression: Any) -> Any:
    """Make all letters real, since the parser does so for some formulas only, and decimals exact; i is imaginary."""
    exact: dict[Any, Any] = {
        letter: I if letter.name == "i" else Symbol(letter.name, real=True) for letter in expression.free_symbols
    }
    exact |= {decimal: Rational(str(decimal)) for decimal in expression.atoms(Float)}
    return expression.xreplace(exact)


# math-verify


@lru_cache(maxsize=1024)
def _parse_answer(text: str) -> list[Any]:
    """Return math-verify's parses of an answer: expressions, then the text."""
    number = plain.parse_plain(text)
    if isinstance(number, numbers.Number) and not number.percent:
        return [Rational(number.value.numerator, number.value.denominator)]
    parsed: list[Any] = parse(f"${text}$", extraction_config=_LATEX, parsing_timeout=None)
    return parsed


def _verify(a: str, b: str) -> bool:
    return _verify_both_ways(_parse_answer(a), _parse_answer(b))


def _verify_both_ways(a: list[Any], b: list[Any]) -> bool:
    """Compare with math-verify in both argument orders: it treats the first as the reference, and a vote has none."""
    forth: Callable[[], bool] = lambda: bool(verify(a, b, timeout_seconds=None))  # noqa: E731
    back: Callable[[], bool] = lambda: bool(verify(b, a, timeout_seconds=None))  # noqa: E731
    if not a or not b:
        return False
    relations = [isinstance(side[0], Relational | And) for side in (a, b)]
    sets = [isinstance(side[0], Set | Tuple) for side in (a, b)]
    if (relations[0] and sets[1]) or (relations[1] and sets[0]):
        return forth() or back()
    return forth() and back()
