r"""Exact values of arithmetic on whole numbers, such as ``(3+4)*5-2/3``, without a computer algebra system."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

_MAX_CHARS = 200
_SYMBOLS = re.compile(r"[\d+\-*/() ]+")
_TIMES, _DIVIDED = re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), re.compile(r"\\div(?![A-Za-z])")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@lru_cache(maxsize=4096)
def evaluate(text: str) -> Fraction | None:
    """Return the value of sums, differences, products and quotients of whole numbers; ``None`` for anything else.

    Anything else includes products without a sign, powers, decimals, and division by zero.
    """
    text = _DIVIDED.sub("/", _TIMES.sub("*", text)).strip()
    if len(text) > _MAX_CHARS or not _SYMBOLS.fullmatch(text):
        return None
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def _evaluate(node: ast.expr) -> Fraction | None:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            inner = _evaluate(operand)
            return inner if inner is None or isinstance(sign, ast.UAdd) else -inner
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            first, second = _evaluate(left), _evaluate(right)
            return None if first is None or second is None else _OPERATIONS[type(op)](first, second)
    return None
