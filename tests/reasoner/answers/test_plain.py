"""Plain answers (numbers, units, lists and words) are parsed and compared without algebra."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reasoner.answers.canonical import canonicalize
from reasoner.answers.normalize import MAX_CHARS, normalize
from reasoner.answers.notation.units import NO_UNIT, Unit, read_unit
from reasoner.answers.numbers import Number
from reasoner.answers.plain import Items, Words, are_same, differs_plainly, parse_number, parse_plain

NUMBERS = {
    "prices": ("\\$18", "\\$18.00", "18\\$", "€18", "£18", "¥18", "$18", "$18$", "$\\$18$", "USD 18", "18 USD",
               "\uff0418", "US$18",
               "\\text{\\$18}", "18 dollars", "$18 per day", "$18/hour", "\\$18/\\text{hour}", "€18,00"),
    "typesetting": ("\\mathbf{18}", "\\textbf{18}", "\\text{18}", "\\fbox{18}", "{18}", "(18)", "[18]", "**18**",
                    "\\(18\\)", "18.",
                    "\\left(18\\right)", "\\color{blue}{18}", "\\displaystyle 18", "\\underline{18}", "1\uff18",
                    "18\u200b", "`18`"),
    "hedges": ("~18", "≈18", "\\approx 18", "about 18", "approximately 18", "= 18", ": 18", "Total = 18",
               "the total cost: 18"),
    "units": ("18~\\text{dollars}", "18\\ \\text{eggs}", "18\\,\\text{cm}", "18 eggs", "18 per day",
              "18 duck eggs a day", "18°",
              "18^\\circ", "18^{\\circ}", "18 percent", "18\\%", "18 %", "18 pct", "18th", "18 (dollars)",
              "18 more", "18 sq. ft",
              "18\\text{ cm}^2", "18 miles per hour", "18 km/h", "18\\mbox{ m}", "18cm", "18 in total", "18 times"),
    "calculations": ("16 + 2 = 18", "9 \\times 2 = 18", "x = 18", "x = 9 + 9 = 18", "18 = x", "f(x) = 18",
                     "x_1 = 18"),
    "other ways": ("18/1", "36/2", "\\frac{36}{2}", "\\frac{9}{0.5}", "1.8e1", "1.8 \\times 10^{1}", "18.0", "018",
                   "+18"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_is_equal_in_every_notation(kind: str) -> None:
    for written in NUMBERS[kind]:
        assert parse_number(written) == 18, written
        assert not differs_plainly(canonicalize(written), "18"), written
        assert not differs_plainly("18", written), written


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3 1/2", Fraction(7, 2)), ("3\\frac{1}{2}", Fraction(7, 2)), ("3½", Fraction(7, 2)),
        ("-3 \\frac12", Fraction(-7, 2)),
        ("3 1/2 hours", Fraction(7, 2)), ("½", Fraction(1, 2)), ("1,200", 1200), ("1,00,000", 100_000),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("12,\\!000", 12_000), ("10{,}000", 10_000), ("10\\,000", 10_000), ("10\u202f000", 10_000),
        ("70 000", 70_000),
        ("\uff11\uff0c\uff10\uff10\uff10", 1000), ("0.\\overline{3}", Fraction(1, 3)),
        ("0.1\\overline{6}", Fraction(1, 6)), ("0.(3)", Fraction(1, 3)),
        ("1e3", 1000), ("1.6e-19", Fraction(16, 10**20)), ("1.6\\times10^{-19}", Fraction(16, 10**20)),
        ("10^{6}", 10**6),
        ("–5", -5), ("\u22125", -5), ("-$5", -5), ("$5 million", 5_000_000), ("$70k", 70_000),
        ("5 thousand", 5000),
        ("\\frac{-1}{2}", Fraction(-1, 2)), ("-\\frac{1}{2}", Fraction(-1, 2)), ("5 feet 3 inches", Fraction(21, 4)),
        ("2 hours and 30 minutes", Fraction(5, 2)), ("5 dollars and 30 cents", Fraction(53, 10)),
    ],
)  # fmt: skip
def test_every_notation_of_a_number_is_parsed_exactly(written: str, value: Fraction) -> None:
    assert parse_number(written) == value
    assert parse_number(canonicalize(written)) == value


@pytest.mark.parametrize(
    "written",
    ["2 3", "7 0000", "1, 200", "100, 200, 300", "3 7/2", "2\\pi", "\\sqrt{2}", "2^3", "5!", "3m", "2x",
     "2 \\sin 3", "1/0", "70000/0",
     "5 more than 3", "3 or 4", "3–5", "12:30", "i^2", "10^{10^{10}}", "1e99999", "9" * 5000, "", " ", "$", "-",
     ".", "101_2", "1.2.3",
     "3 plus 4", "18 and a half", "x", "a = b", "3x = 9", "2 over 3"],
)  # fmt: skip
def test_text_that_is_no_number_is_not_parsed_as_one(written: str) -> None:
    assert parse_number(written) is None


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("1, 2", "2, 1", True), ("1,2", "\\{2, 1\\}", True), ("6 and 8", "6, 8", True),
        ("21, 16 or 11", "11, 16, 21", True),
        ("(1,3)", "1,3", True), ("(3,1)", "1,3", False), ("(1,2)", "(2,1)", False), ("(1, 2)", "[1, 2]", False),
        ("[1,2)", "[1,2]", False),
        ("\\{1,2\\}", "(1,2)", False), ("[1,2,3]", "1, 2, 3", True), ("1, 2", "1, 2, 2", False),
        ("\\pm 5", "-5, 5", True),
        ("\\pm 5", "5", False), ("x=1, x=2", "1, 2", True), ("x=1, y=2", "y=2, x=1", True),
        ("x=1, y=2", "2, 1", False),
        ("(x,y)=(1,2)", "(1,2)", True), ("\\{5\\}", "5", True), ("1;2", "2;1", True), ("1, 200", "1200", False),
        ("100, 200, 300", "100200300", False), ("-2, 1", "-2,1", True),
    ],
)  # fmt: skip
def test_lists_remain_lists_and_brackets_decide_if_order_matters(a: str, b: str, equal: bool) -> None:
    assert differs_plainly(a, b) is not equal
    assert differs_plainly(b, a) is not equal


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("3 cm", "3 m", False), ("3 cm", "3", True), ("300 cm", "3 m", True), ("300 cm", "3", False),
        ("18 dollars", "$18", True),
        ("18 dollars", "18 cents", False), ("50 cents", "$0.50", True), ("18 dollars", "18 euros", False),
        ("3 AM", "3 p.m.", False),
        ("60 mph", "60 miles per hour", True), ("60 km/h", "60 mph", False),
        ("60 miles", "60 miles per hour", True), ("36 km/h", "10 m/s", True),
        ("5 cm^2", "5 square centimeters", True), ("5 cm^2", "5 cm^3", False), ("1 hour", "60 minutes", True),
        ("18 eggs", "18 hens", False), ("18 eggs", "18 duck eggs", True), ("18 eggs", "18", True),
        ("18 per day", "18 per week", False), ("50%", "1/2", True), ("50%", "50", True), ("50%", "5", False),
        ("20 degrees Celsius", "20°C", True),
        ("101_2", "101_3", False), ("101_2", "101_{2}", True), ("204_5", "204", True), ("101_2", "12_3", True),
        ("x=5", "5", True), ("x=5", "y=5", False), ("0.333333", "1/3", True), ("0.33", "1/3", False),
        ("0.0833333333", "1/12", True),
        ("1.6e-19", "9.1e-31", False), ("0.3", "3/10", True), ("3.14159", "3.141592", False),
    ],
)  # fmt: skip
def test_a_missing_unit_is_ignored_and_a_different_one_is_not(a: str, b: str, equal: bool) -> None:
    assert differs_plainly(a, b) is not equal
    assert differs_plainly(b, a) is not equal


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [("No", "On", False), ("abc", "bca", False), ("study", "dusty", False), ("\\text{yes}", "Yes.", True),
     ("New  York", "new york", True),
     ("\\text{no solution}", "no solution", True), ("3–5", "3-5", False), ("12:00", "1:00", False),
     ("Monday", "5", False)],
)  # fmt: skip
def test_words_are_compared_by_their_letters(a: str, b: str, equal: bool) -> None:
    assert differs_plainly(a, b) is not equal


def test_plain_answers_are_classified_by_kind() -> None:
    assert isinstance(parse_plain("18 eggs"), Number)
    assert isinstance(parse_plain("1, 2"), Items)
    assert isinstance(parse_plain("Evelyn"), Words)
    assert parse_plain("x + 1") is None
    assert read_unit("duck eggs a day") == Unit((), (("day", 1),), "duck eggs")
    assert read_unit("in total") == NO_UNIT


PIECES = st.sampled_from(
    ["1", "2", "200", "1,200", "3.5", "0", "1/2", "\\frac{1}{2}", "%", "$", "\\$", " ", ", ", ",", ";", "(", ")",
     "[", "]", "\\{", "\\}", "-",
     "x=", "=", " cm", " m", " dollars", " eggs", " and ", " or ", "^2", "_2", "e3", "\\pm ", "°", "½", "No", "abc",
     "x", "!", "\\text{", "}"]
)  # fmt: skip
ANSWERS = st.lists(PIECES, min_size=1, max_size=7).map("".join)


@given(ANSWERS, ANSWERS)
def test_equality_is_symmetric_and_the_same_for_canonical_forms(a: str, b: str) -> None:
    ours, theirs = parse_plain(a), parse_plain(b)
    if ours is None or theirs is None:
        return
    assert are_same(ours, ours)
    assert are_same(ours, theirs) == are_same(theirs, ours)
    again = parse_plain(canonicalize(a))
    assert again is not None, canonicalize(a)
    assert are_same(again, ours), canonicalize(a)


@given(ANSWERS)
@example("dollars$1\\$\\text{dollars}")
@example("\\text{0\\} dollarsx=abc")
@example("½ m and ½ cm")
@example("$\\frac{1}{2}%")
@example("==abc dollars")
def test_canonicalization_of_a_plain_answer_is_idempotent(answer: str) -> None:
    once = canonicalize(answer)
    if parse_plain(answer) is not None:
        assert canonicalize(once) == once


@pytest.mark.parametrize(
    "unit",
    [
        "$",
        "{",
        "\\",
        "1,",
        "1 ",
        "a ",
        "(",
        "½",
        "\\frac",
        "=1",
        "1 cm ",
        ", ",
        "\\text{",
        "0.",
        "1/",
        "**",
        "x=",
        "-",
        "ab.",
    ],
)
def test_repetitive_text_is_parsed_in_linear_time(unit: str) -> None:
    """A pattern with backtracking would take hours and exceed the test runner's time limit."""
    text = unit * (MAX_CHARS // len(unit))
    for answer in (text, f"5 {text}", f"${text}$", unit * 64_000):
        assert "  " not in canonicalize(answer[:MAX_CHARS])
        assert "  " not in normalize(answer)
