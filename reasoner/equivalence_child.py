"""The child of ``reasoner.equivalence``: whether two answers are the same mathematics.

What is plainly different is told apart by numbers, at a hundredth of the price of algebra: both are evaluated where
their letters stand for fixed numbers.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, Integral, Limit, Product, Sum, UnevaluatedExpr

from reasoner.child import serve

PLAIN_DIFFERENCE = 0.01
"""Relative; far above what math-verify rounds away."""
_LATEX = [LatexExtractionConfig()]  # its other reader evaluates the text as Python


@lru_cache(maxsize=1024)
def read(text: str) -> list[Any]:
    """math-verify's parses of an answer: expressions, then the text."""
    parsed: list[Any] = parse(f"${text}$", extraction_config=_LATEX, parsing_timeout=None)
    return parsed


def equal(pair: list[str]) -> bool:
    """Symmetric, as a vote needs it: math-verify itself takes its first argument for the truth."""
    a, b = map(read, pair)
    if a and b and plainly_different(a[0], b[0]):
        return False
    return bool(verify(a, b, timeout_seconds=None) or verify(b, a, timeout_seconds=None))


def plainly_different(a: Any, b: Any) -> bool:
    """Whether two expressions have clearly different values; not for percentages, which equal two numbers."""
    costly = (UnevaluatedExpr, Sum, Integral, Limit, Product)
    if not isinstance(a, Expr) or not isinstance(b, Expr) or a.has(*costly) or b.has(*costly):
        return False
    letters = sorted(a.free_symbols | b.free_symbols, key=str)
    if "i" in map(str, letters):  # math-verify may take it for the imaginary unit
        return False
    numbers = {letter: 1.2345 + 0.7071 * index for index, letter in enumerate(letters)}
    x, y = (value.evalf(15, subs=numbers) for value in (a, b))  # not floats: 10^{10^{10}} is a number here
    return bool(abs(x - y) > PLAIN_DIFFERENCE * max(1, abs(x), abs(y)))


def main() -> None:
    logging.disable()  # math-verify reports every answer that it cannot parse; that is not an event here
    serve(lambda pair: equal(pair))


if __name__ == "__main__":
    main()
