"""Formulas compared by algebra in this process, without a worker process."""

from __future__ import annotations

import pytest

from benchmarks.answers.measure import is_near
from benchmarks.answers.pairs import DIFFERENT, EQUAL, NUMERIC
from reasoner.answers.algebra import are_equal, split_list
from reasoner.answers.canonical import canonicalize


def both(a: str, b: str) -> set[bool]:
    """Return the verdicts in both directions."""
    a, b = canonicalize(a), canonicalize(b)
    return {a == b or are_equal(a, b), b == a or are_equal(b, a)}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_pairs_are_equal_in_both_orders(kind: str) -> None:
    for pair in EQUAL[kind]:
        assert both(*pair.split(" | ")) == {True}, pair


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_pairs_differ_in_both_orders(kind: str) -> None:
    for pair in DIFFERENT[kind]:
        assert both(*pair.split(" | ")) == {False}, pair


@pytest.mark.parametrize("verdict", NUMERIC)
def test_the_rule_numeric_reads_numbers_and_no_formulas(verdict: str) -> None:
    for pair in NUMERIC[verdict]:
        assert is_near(pair) == (verdict == "equal"), pair


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("x^2/4 + y^2/3 = 1", "x^2/16 + y^2/12 = 1/4", True),
        ("2x+4y-3=0", "2x+4y-4=0", False),
        ("x = 5+5+1 = 11", "x=11", True),
        ("x=\\sqrt{2}", "y=\\sqrt{2}", False),
        ("|AB|=\\sqrt{2}", "\\sqrt{2}", True),
        ("x+z=\\sqrt{2}", "\\sqrt{2}", False),
        ("e^{i\\pi}", "-1", True),
        ("3+4i", "4i+3", True),
        ("\\ln(x^2)", "2\\ln(x)", False),
        ("\\frac{1}{100!}", "\\frac{1}{101!}", False),
        ("10^{-30}x", "10^{-31}x", False),
        ("\\sqrt{2}", "1.41421356", True),
        ("(\\sqrt{2}, 1)", "(1, \\sqrt{2})", False),
        ("\\sqrt{2}, 1", "1, \\sqrt{2}", True),
        ("\\{x, 2x\\}", "\\{2x, x\\}", True),
        ("\\begin{pmatrix}1 & 2 \\\\ 3 & 4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", True),
        ("\\begin{pmatrix}1 & 2 \\\\ 3 & 4\\end{pmatrix}", "\\begin{pmatrix}1 & 2 \\\\ 3 & 5\\end{pmatrix}", False),
        ("[-1, -\\frac12) \\cup (0, 1)", "[-1,-0.5)\\cup(0,1)", True),
        ("the sum of x and y", "the sum of y and x", False),
        ("-2 \\le x \\le 7", "x \\in [-2, 7]", True),
        ("-2 \\le x \\le 7", "x \\in [-2, 8]", False),
        ("0.1 + 0.2", "0.3", True),
        ("0.1x + 0.2x", "0.3x", True),
        ("0.1 + 0.2", "0.31", False),
    ],
)
def test_formulas_are_compared_up_to_algebra(a: str, b: str, same: bool) -> None:
    assert both(a, b) == {same}


def test_lists_of_formulas_are_split_only_outside_brackets() -> None:
    assert split_list("x,\\frac{1}{f(2,3)}") == ("", ("x", "\\frac{1}{f(2,3)}"))
    assert split_list("(x,y)") == ("()", ("x", "y"))
    assert split_list("f(x,y)") is None
    assert split_list("x,(y") is None
