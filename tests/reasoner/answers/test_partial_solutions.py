"""Extraction from partial solutions, and its cost on repetitive text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.answers.extraction.extract import MAX_CHARS, extract_answer
from reasoner.answers.extraction.phrases import ExtractionStopped, iter_announcements
from reasoner.answers.spec import AnswerSpec
from tests.long import mostly_long_grid


def spec(extract: object = "auto", compare: str = "math") -> AnswerSpec:
    return AnswerSpec.model_validate({"compare": compare, "extract": extract})


@pytest.mark.parametrize(
    ("text", "ended", "answer"),
    [
        ("The answer is 1", "inside", None),
        ("The answer is 1.", "inside", None),
        ("The answer is 1.5", "inside", None),
        ("The answer is 1.5.\n", "inside", "1.5"),
        ("The answer is $\\frac{1}{2}$", "inside", "\\frac{1}{2}"),
        ("The answer is:\n\n", "step", None),
        ("The answer is 12\n\n", "step", "12"),
        ("#### 1", "inside", None),
        ("#### 12\n\n", "step", "12"),
        ("\\boxed{1", "inside", None),
        ("\\boxed{12}", "inside", "12"),
    ],
)
def test_partial_answer_is_not_extracted(text: str, ended: ExtractionStopped, answer: str | None) -> None:
    assert extract_answer(text, stopped=ended) == answer


def test_unclosed_code_block_of_a_step_is_not_extracted() -> None:
    assert extract_answer("```python\ndef f():\n\n", spec("code"), "step") is None
    assert extract_answer("The answer is B", spec(compare="choice"), "inside") is None
    assert extract_answer("The answer is (B)", spec(compare="choice"), "inside") == "B"
    assert extract_answer("Consider\nB\n\n", spec(compare="choice"), "step") is None


FORMS = st.sampled_from(
    ["\\boxed{12}", "the answer is 12.5.\n", "#### 125\n", "```\nx = 12\n```\n", "(C) is correct. "]
)


@given(st.lists(FORMS, min_size=1, max_size=3), st.sampled_from(["math", "choice", "code"]), st.data())
def test_a_prefix_never_states_an_answer_that_the_whole_does_not_contain(
    forms: list[str], compare: str, data: st.DataObject
) -> None:
    """Cut anywhere, a text yields one of its complete answers, never a part of one."""
    text = "So\n".join(forms)
    cut = data.draw(st.integers(0, len(text)))
    stated = extract_answer(text[:cut], spec(compare=compare), "inside")
    assert stated in {"math": {"12", "12.5", "125"}, "choice": {"C"}, "code": {"x = 12"}}[compare] | {None}


@pytest.mark.parametrize(
    ("unit", "compare"),
    mostly_long_grid(
        [
            " ",
            "\n",
            "the answer is ",
            "\\boxed{",
            "#### ",
            "```\n",
            "(",
            "A ",
            "final answer",
            "{",
            "$",
            "\\",
            "}",
            "<answer>",
            "答案",
            "The answer is $18 and ",
            '"answer": ',
            "answer to a ",
            "**",
            "The answer is \\(",
            "\\boxed{1}, ",
            "option A is ",
        ],
        ["math", "text", "choice", "code"],
        every=5,
    ),
)
def test_extraction_from_repetitive_text_takes_linear_time(unit: str, compare: str) -> None:
    """A pattern with backtracking would exceed the test runner's time limit."""
    for text in (unit * (600_000 // len(unit)), "The answer is " + unit * (600_000 // len(unit))):
        answer = extract_answer(text, spec(compare=compare))
        assert answer is None or len(answer) <= MAX_CHARS


class _Searched(str):
    """Text that counts the characters searched in it from the right."""

    searched = 0

    def lower(self) -> _Searched:
        return self

    def rfind(self, cue: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        at = str(self).rfind(cue, start, end)
        _Searched.searched += (len(self) if end is None else end) - max(at, 0)
        return at


def test_announcements_are_searched_once_per_character() -> None:
    text = _Searched("答案是18。\n" + "transfer " * 10_000)
    assert iter_announcements(text) == [0]
    assert _Searched.searched <= 2 * len(text)  # once for each of two words
