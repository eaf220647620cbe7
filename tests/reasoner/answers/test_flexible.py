"""Flexible extraction: the last number or letter of a finished solution that states no answer."""

from __future__ import annotations

import pytest

from reasoner.answers.extraction.extract import extract_answer, find_answer
from reasoner.answers.spec import AnswerSpec, CodeExtract

LAST_NUMBER = [
    ("She gives away 3, and there are 16 rolls left.", "16"),
    ("He has 3 apples and gets 4 more, so 7 apples.", "7"),
    ("each costs \\$1,234.50 now", "\\$1,234.50"),
    ("it rose to 50% last year", "50%"),
    ("it leaves 3/4 cup of it", "3/4"),
    ("it leaves \\frac{3}{4} of it", "\\frac{3}{4}"),
    ("it falls to -5 degrees", "-5"),
    ("from 20-4 eggs", "4"),
    ("from 20 - 4 eggs", "4"),
    ("a rope of 30cm remains", "30"),
    ("the ropes measure 3.14.", "3.14"),
    ("He has 7 left.\n\nStep 4: check it", "7"),
    ("1. He has 7 left.\n2. That is all", "7"),
    ("He came 2nd with 12 points and x^2", "12"),
    ("he has 5 left\n\nQuestion: Tom has 9 pens?", "5"),
    ("Problem: Tom has 9 pens.\nhe keeps 4 of them", "4"),
    ("<think>it is 8</think>it leaves 4 of them", "4"),
]
LAST_CHOICE = [
    ("(A) is wrong and so it must be (C), I guess", "C"),
    ("A friend would take option D here", "D"),
    ("maybe **B** it is", "B"),
    ("I would take B", "B"),
]


@pytest.mark.parametrize(("text", "number"), LAST_NUMBER)
def test_the_last_number_is_a_flexible_answer(text: str, number: str) -> None:
    assert extract_answer(text) is None
    assert find_answer(text) == (number, "flexible")


@pytest.mark.parametrize(("text", "letter"), LAST_CHOICE)
def test_the_last_letter_is_a_flexible_choice(text: str, letter: str) -> None:
    spec = AnswerSpec(compare="choice")
    assert extract_answer(text, spec) is None
    assert find_answer(text, spec) == (letter, "flexible")


@pytest.mark.parametrize("text", ["I see no way.", "A dog, and I like it.", "", "1. First\n2. Second", "at x^2"])
def test_a_text_without_number_or_letter_has_no_answer(text: str) -> None:
    assert find_answer(text) is None
    assert find_answer(text, AnswerSpec(compare="choice")) is None


@pytest.mark.parametrize(
    "text", ["\\boxed{3} of 4 rolls", "#### 3", "The answer is 3.\n\nI checked it 2 times.", "= 3"]
)
def test_a_stated_answer_is_strict(text: str) -> None:
    assert find_answer(text) == ("3", "strict")


@pytest.mark.parametrize(
    "spec",
    [AnswerSpec(extract="boxed"), AnswerSpec(extract="hash"), AnswerSpec(extract="phrase"), AnswerSpec(compare="text"),
     AnswerSpec(compare="code"), AnswerSpec(extract=CodeExtract(code="python"))],
)  # fmt: skip
def test_what_was_asked_for_by_name_has_no_flexible_level(spec: AnswerSpec) -> None:
    assert find_answer("there are 16 rolls left", spec) is None


def test_an_unfinished_solution_has_no_flexible_answer() -> None:
    for stopped in ("inside", "step"):
        assert find_answer("there are 16 rolls left", None, stopped) is None  # type: ignore[arg-type]
    assert find_answer("<think>there are 16 rolls left") is None


def test_the_numbers_of_a_long_text_are_searched_from_its_end() -> None:
    assert find_answer("7 " * 32_000 + "and x^2") == ("7", "flexible")
    assert find_answer("1.2.3." * 10_000) is None
