r"""Symbolic equality of two formulas. Imports sympy, so only a child process may import this module.

Rules: two equations are equal if lhs - rhs agree up to a constant factor. An equation equals an expression only if its
left side is a name, as in ``x = \sqrt{2}``. Values are compared by relative difference. Lists of formulas are compared
element by element, as sets within braces or without brackets, and else in order. math-verify must give the same result
for both argument orders, except for a relation compared with a set.
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

from reasoner.answers import arithmetic, numbers, plain
from reasoner.answers.units import are_same_amount

EXACT = float(arithmetic.NEARLY)
"""Relative tolerance between two values without decimals."""
ROUNDED = 1e-5
"""Relative tolerance if one of the values is written in decimals."""
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
_WORDY = re.compile(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*")


def are_equal(a: str, b: str) -> bool:
    """Return True if two canonical answers are mathematically equal; symmetric in its arguments."""
    decided = plain.decide_equal(a, b)
    if decided is not None:
        return decided
    a, unit = numbers.split_unit(a)
    b, other = numbers.split_unit(b)
    if not are_same_amount(Fraction(1), unit, Fraction(1), other):
        return False
    return _equal_lists(a, b) if _is_list(a) or _is_list(b) else _equal_formulas(a, b)


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
    text = _WORDY.sub(",", text)
    if not re.search(r"[,;]", text):
        return None
    for opening in ("\\{", "(", "["):
        if text.startswith(opening):
            for closing in ("\\}", ")", "]"):
                inner = text[len(opening) : -len(closing)]
                if text.endswith(closing) and (parts := _top_level(inner)) and len(parts) > 1 and "" not in parts:
                    return ("{}" if opening == "\\{" else opening + closing), parts
    parts = _top_level(text)
    return ("", parts) if parts and 1 < len(parts) <= MAX_ITEMS and "" not in parts else None


def _top_level(text: str) -> tuple[str, ...] | None:
    """Split at the commas outside of brackets; ``None`` for unbalanced brackets."""
    depth, parts, begin = 0, [], 0
    for index, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif char in ",;" and not depth:
            parts.append(text[begin:index].strip())
            begin = index + 1
    return None if depth else (*parts, text[begin:].strip())


def _equal_lists(a: str, b: str) -> bool:
    ours, theirs = split_list(a), split_list(b)
    if ours is None or theirs is None:
        one = ours or theirs
        assert one is not None
        compared = (_COMPARES.search(a) or _COMPARES.search(b)) is not None
        single = len(one[1]) == 1 and one[0] == "{}"
        if not (compared or single or _is_odd(a) or _is_odd(b)):
            return False
        return _verified(_without_member(a, b), _without_member(b, a))
    kinds = {ours[0], theirs[0]}
    if len(ours[1]) != len(theirs[1]):
        return False
    if kinds <= {"", "{}"}:
        return plain.can_pair_up(ours[1], theirs[1], are_equal) and plain.can_pair_up(theirs[1], ours[1], are_equal)
    if len(kinds) == 2 and not (kinds == {"", "()"} or (kinds == {"", "[]"} and len(ours[1]) > 2)):
        return False
    return all(map(are_equal, ours[1], theirs[1]))


def _is_odd(text: str) -> bool:
    """Return True for sets and matrices, which math-verify compares."""
    return re.search(r"\\(?:cup|cap|setminus|begin|mathbb|emptyset)(?![A-Za-z])", text) is not None


# Two formulas


def _equal_formulas(a: str, b: str) -> bool:
    if not _COMPARES.search(a) and not _COMPARES.search(b):
        ours, theirs = _sides(a), _sides(b)
        if ours and theirs:
            return _equal_equations(ours, theirs)
        for equation, other in ((ours, b), (theirs, a)):
            if equation:
                return _is_name(equation[0]) and are_equal(equation[1], other)
    return _equal_expressions(_read(_without_member(a, b)), _read(_without_member(b, a)))


def _without_member(text: str, other: str) -> str:
    r"""Return S for ``x \in S`` if the other answer is no membership statement."""
    return text if _MEMBER.match(other) else _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text


def _sides(text: str) -> tuple[str, str] | None:
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
    left, right, other_left, other_right = (_one_expression(_read(side)) for side in (*ours, *theirs))
    if left is None or right is None or other_left is None or other_right is None:
        return _verified("=".join(ours), "=".join(theirs))
    return _proportional(left - right, other_left - other_right)


def _one_expression(parsed: list[Any]) -> Any | None:
    return _unified(parsed[0]) if parsed and isinstance(parsed[0], Expr) and not parsed[0].has(*_COSTLY) else None


def _proportional(f: Any, g: Any) -> bool:
    """Return True if two expressions are equal up to a constant factor, by their values at sample points."""
    letters = tuple(sorted(f.free_symbols | g.free_symbols, key=str))
    if f.free_symbols != g.free_symbols:
        return False
    ratio = None
    for start, step in (*_POSITIVE, _NEGATIVE):
        x, y = (_value(side, letters, start, step) for side in (f, g))
        if x is None or y is None or not x or not y:
            if (x is None) != (y is None) or bool(x) != bool(y):
                return False
            continue
        if ratio is not None and abs(x / y - ratio) > EXACT * abs(ratio):
            return False
        ratio = x / y
    return ratio is not None


def _equal_expressions(a: list[Any], b: list[Any]) -> bool:
    if not a or not b:
        return False
    ours, theirs = _one_expression(a), _one_expression(b)
    if ours is not None and theirs is not None:
        verdict = _same_values(ours, theirs)
        if verdict is not None:
            return verdict
        return _both_ways([ours], [theirs])
    return _both_ways(a, b)


def _same_values(a: Any, b: Any) -> bool | None:
    """Compare the values at sample points to many digits; ``None`` if that is inconclusive."""
    letters = tuple(sorted(a.free_symbols | b.free_symbols, key=str))
    rounded = a.has(Float) or b.has(Float)
    points = (*_POSITIVE, _NEGATIVE) if letters else _POSITIVE[:1]
    agreed = 0
    for start, step in points:
        x, y = (_value(side, letters, start, step) for side in (a, b))
        if x is None or y is None:
            continue
        largest = max(abs(x), abs(y))
        if abs(x - y) <= EXACT * largest:
            agreed += 1
        elif not (rounded and abs(x - y) <= ROUNDED * largest) and (start, step) != _NEGATIVE:
            return False  # elsewhere roots and logarithms may have other branches
    return True if agreed == len(points) else None


@lru_cache(maxsize=4096)
def _value(expression: Any, letters: tuple[Any, ...], start: Any, step: Any) -> Any | None:
    """Return the value at fixed numbers for the letters, ``None`` if it has none; 0 if all its digits cancel."""
    points = {letter: start + step * index for index, letter in enumerate(letters)}
    value = expression.evalf(18, subs=points)  # not floats: 10^{10^{10}} is a number here
    if not value.is_number or not value.is_finite:
        return None
    parts = [0 if isinstance(part, Float) and part._prec == 1 else part for part in value.as_real_imag()]
    return parts[0] + I * parts[1] if parts[1] else parts[0]


def _unified(expression: Any) -> Any:
    """Make all letters real, since the parser does so for some formulas only; i is the imaginary unit."""
    letters = {
        letter: I if letter.name == "i" else Symbol(letter.name, real=True) for letter in expression.free_symbols
    }
    return expression.xreplace(letters)


# math-verify


@lru_cache(maxsize=1024)
def _read(text: str) -> list[Any]:
    """Return math-verify's parses of an answer: expressions, then the text."""
    number = plain.parse_plain(text)
    if isinstance(number, numbers.Number) and not number.percent:
        return [_number(number.value)]
    parsed: list[Any] = parse(f"${text}$", extraction_config=_LATEX, parsing_timeout=None)
    return parsed


def _number(value: Fraction) -> Any:
    """Convert a decimal with many digits to a float, for which sympy allows rounding."""
    places = numbers.count_decimals(value)
    if places is None or places < numbers.ROUNDED_DIGITS:
        return Rational(value.numerator, value.denominator)
    return Float(Rational(value.numerator, value.denominator), 15)


def _verified(a: str, b: str) -> bool:
    return _both_ways(_read(a), _read(b))


def _both_ways(a: list[Any], b: list[Any]) -> bool:
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
