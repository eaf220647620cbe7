"""Extraction of the stated answer from a finished solution."""

from __future__ import annotations

from fractions import Fraction

import pytest
from pydantic import ValidationError

from benchmarks.answers.styles import STYLES, written
from reasoner.answers.canonical import canonicalize
from reasoner.answers.extraction.extract import extract_answer
from reasoner.answers.plain import decide_equal, parse_number
from reasoner.answers.spec import AnswerSpec
from reasoner.jobs.spec import JobSpec
from tests.specs import build_spec


def spec(extract: object = "auto", compare: str = "math") -> AnswerSpec:
    return AnswerSpec.model_validate({"compare": compare, "extract": extract})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{42}", "42"),
        ("\\boxed{1} no, \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{7} and then \\boxed{8", "7"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
        ("{ \\boxed {7}", "7"),
        ("\\boxed{ }", None),
        ("\\boxed{", None),
        ("42", None),
        ("", None),
    ],
)
def test_last_complete_box_is_the_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text, spec("boxed")) == answer
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Adding up, the answer is 42.", "42"),
        ("The answer is 3.5. I am sure of it.", "3.5"),
        ("The final answer is: $\\frac{1}{2}$ of a cake.", "\\frac{1}{2}"),
        ("Final answer: 7", "7"),
        ("**Final Answer:** 1,000", "1,000"),
        ("## Final Answer\n\n\\[ x = 4 \\]", "x = 4"),
        ("Answer: -3", "-3"),
        ("The answer is therefore 12 apples, because 3 * 4 = 12.", "12 apples"),
        ("The answer is\n\n\\[\n5\n\\]", "5"),
        ("The answer is 1. Wait. The answer is 2.", "2"),
        ("The answer is 1. The answer is not obvious, though.", "1"),
        ("The answer is not obvious.", None),
        ("The answer is 5 more than 3.", None),
        ("We look for the answer.", None),
        ("So 4 + 4 = 8.\n#### 8", "8"),
        ("#### Step 3: add\n4 + 4 = 8\n#### 1,234", "1,234"),
        ("#### Step 3: add", None),
        ("#### 8\nThe answer is 9. \\boxed{10}", "10"),
        ("<think>The answer is 4. Or 5?</think>\nThe answer is 6.", "6"),
        ("<think>The answer is \\boxed{4}. Or", None),
    ],
)
def test_math_prefers_box_then_hash_then_phrase(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


STATED: dict[str, list[tuple[str, str | None]]] = {
    "prices": [
        ("The answer is $18. She has $5 left.", "$18"),
        ("The answer is $18.\n\nShe had $20.", "$18"),
        ("The answer is $1,800 (or $150 a month, $5 a day).", "$1,800"),
        ("The answer is $18, $2 more than before.", "$18"),
        ("The answer is $18 per day, and $20 is left.", "$18 per day"),
        ("The answer is $18$ dollars.", "18"),
        ("The answer is $12$ and $13$.", "12, 13"),
        ("The answer is $\\$18$ per day.", "\\$18"),
    ],
    "phrases": [
        ("The answer to the question is 18.", "18"),
        ("The answer should be 18.", "18"),
        ("The answer turns out to be 18.", "18"),
        ("The answer would be 18, since 3 * 6 = 18.", "18"),
        ("The answer is ~18", "~18"),
        ("The answer is 18 (see step 2).", "18"),
        ("The answer is that Janet makes $18 every day.", "18 every day"),
        ("Final Answer: The largest $n$ is 34. I hope it is correct.", "34"),
        ("The answer is 18 dollars for the 9 eggs.", "18 dollars"),
        ("The answer is 5 feet, 3 inches.", "5 feet, 3 inches"),
        ("The answer is (B) 18.", "18"),
        ("The wrong answer is 5. So it is not that.", None),
        ("The answer is more than 5.", "more than 5"),
        ("The answer is not 5.", None),
        ("Answer: see step 3.", None),
        ('The answer is \\"$12 $ and $13 $\\".', "12, 13"),
        ("Thus $x <= 2$ is our answer.", "x <= 2"),
        ("So \\(\\frac{1}{2}\\) is the answer.", "\\frac{1}{2}"),
        ("So $18 is the answer, and $5 is left.", "$18"),
        ("5x + 3 is the answer", None),
        ("Ans. 18", "18"),
        ("The ans. is not 5.", None),
    ],
    "short": [
        ("Answer = 18", "18"),
        ("Ans: 18", "18"),
        ("**Answer**: 18", "18"),
        ("> Answer: 18", "18"),
        ("- **Answer:** 18", "18"),
        ("Answer\uff1a18", "18"),
        ("答案是18。", "18"),
        ("So it is **$18**.", "$18"),
        ("**3.** Then she rests.", None),
    ],
    "headings": [
        ("## Answer\n\n18", "18"),
        ("**Answer:**\n- 18\n", "18"),
        ("### Final Answer\n\n**18 dollars**", "18 dollars"),
        ("Final Answer\n============\n18", "18"),
        ("## Answer\n\nWe do not know.", None),
    ],
    "boxes": [
        ("\\boxed 18", "18"),
        ("\\fbox{18}", "18"),
        ("\\boxed{\\text{The answer is } 18}", "18"),
        ("$\\boxed{2}$ and $\\boxed{3}$", "2, 3"),
        ("$\\boxed{2}$. Then $\\boxed{3}$", "3"),
    ],
    "behind a box": [
        ("= \\boxed{200}, so she has $10,455. Final Answer: The final answer is $10,455$.", "10,455"),
        ("That makes $\\boxed{3}$ a day.\n<answer>18</answer>", "18"),
        ("That makes $\\boxed{3}$ a day.\n#### 18", "18"),
        ("$\\boxed{18}$ is the final answer.", "18"),
        ("$\\boxed{18}$. The final answer is easy to check.", "18"),
        ("$\\boxed{18}$. If the answer is 4, this is wrong.", "18"),
        ("<answer>$\\boxed{18}$</answer>", "18"),
    ],
    "last sentences": [
        ("She sells 9 eggs for $2 each. So she earns $18 in total.", "18 in total"),
        ("Therefore, x = 18.", "x = 18"),
        ("Therefore, the probability that Alice wins is 2/3. <|im_start|>user", "2/3"),
        ("A: 18", "18"),
        ("So she needs 5 more than 3.", None),
        ("So the 9 eggs are sold at the market.", None),
        ("Finally she sells her 9 eggs.", None),
        ("So 9 eggs are sold for $2 each.", None),
        ("Let us begin with the 18 eggs.", None),
        ("So we need 18 of them first.", None),
    ],
    "calculations": [
        ("So the answer is 9 eggs * $2 = $18.", "$18"),
        ("The answer is 9 x $2 = $18 per day", "$18 per day"),
        ("Final Answer: Janet makes 9 * $2 = $18 every day.", "$18 every day"),
        ("Therefore, she makes 9 * 2 = $18 every day.", "$18 every day"),
        ("\\boxed{\\text{She makes } 9 \\times 2 = 18}", "18"),
        ("So x + 3 = 18 for every day.", None),
        ("So 2x = 18 for every day.", None),
        ("The answer is 18 dollars less than 20.", None),
        ("The answer is $18 more than before.", "$18 more than before"),
    ],
    "HTML": [
        ("The answer is <b>18</b>.", "18"),
        ("<p>The answer is <strong>18</strong>.</p>", "18"),
        ("Answer: 18<br>", "18"),
        ("The answer is a<b>c.", "a<b>c"),
    ],
    "questions behind it": [
        ("The answer is 18.\n\nQ: A farmer has 5 cows.\nA: 5 * 4 = 20. The answer is 20.", "18"),
        ("#### 18\n\nQuestion: And then?\n#### 20", "18"),
        ("\\boxed{18}\n\nProblem 2: And then?\n\\boxed{20}", "18"),
        ("Q: How many eggs are left? The answer is 9.\nQ: How much does she make? The answer is 18.", "18"),
        ("There are 3.\nQuestion: how many are left? The answer is 2.", "2"),
    ],
    "structured": [
        ("<answer>18</answer>", "18"),
        ("<answer> The answer is 18. </answer>", "18"),
        ("<answer>18", "18"),
        ('{"answer": 18}', "18"),
        ("{'answer': ''}", None),
        ("{'answer': '18'}", "18"),
        ("#### 18 ####", "18"),
        ('{"steps": 2, "final_answer": "$1,800"}', "$1,800"),
        ('{"answer": "\\\\frac{1}{2}"}', "\\frac{1}{2}"),
        ('{"answer": "\\frac{1}{2}"}', "\\frac{1}{2}"),
    ],
}


@pytest.mark.parametrize("kind", STATED)
def test_answer_is_extracted_from_model_styles(kind: str) -> None:
    for text, answer in STATED[kind]:
        assert extract_answer(text) == answer, text


@pytest.mark.parametrize("kind", STYLES)
def test_every_benchmark_style_is_extracted_as_its_number(kind: str) -> None:
    for style in STYLES[kind]:
        for number in ("18", "1800", "-3", "2.5", "70000"):
            answer = extract_answer(written(style, number))
            assert answer is not None, style
            assert parse_number(answer) == Fraction(number), (style, answer)
            assert decide_equal(canonicalize(number), canonicalize(answer)), (style, answer)


def test_weakly_marked_answer_counts_only_at_the_end() -> None:
    """Extracting it from the middle of a text would let a step that mentions a number end its branch."""
    for text in ("So far that is **12**.", "The answer is that she has 12 eggs.", "<answer>12"):
        assert extract_answer(text, stopped="end") is not None
        assert extract_answer(text, stopped="step") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is \\(B\\).", "B"),
        ("Option B is correct.", "B"),
        ("The best answer is C) 18 eggs", "C"),
        ("<answer>D</answer>", "D"),
        ('{"answer": "(E)"}', "E"),
        ("Answer\uff1a\uff22", "B"),
        ("The answer is $\\text{(C)}$.", "C"),
        ("The answer is **D**.", "D"),
        ("Option A is not right.", None),
        ("The answer is (B).", "B"),
        ("The answer is B", "B"),
        ("Answer: **C**", "C"),
        ("the correct option is D because it fits", "D"),
        ("I choose option (e)", "E"),
        ("\\boxed{\\text{(B)}}", "B"),
        ("\\boxed{b}", "B"),
        ("\\boxed{J. Paris}", "J"),
        ("(C) is correct", "C"),
        ("It must be\nB", "B"),
        ("Option A: too small. Option B: too large.", None),
        ("The answer is a dog.", None),
        ("The answer is I think not here.", None),
        ("The answer is Kenya.", None),
        ("\\boxed{Kenya}", None),
    ],
)
def test_choice_is_extracted_in_its_usual_forms(text: str, answer: str | None) -> None:
    assert extract_answer(text, spec(compare="choice")) == answer


CODE = "Draft:\n```\nx = 0\n```\nBetter:\n```python\ndef f():\n\n    return 1\n```\nand a shell:\n```sh\nls\n```\n"


def test_code_is_the_last_closed_block_of_its_language() -> None:
    assert extract_answer(CODE, spec(compare="code")) == "ls"
    assert extract_answer(CODE, spec({"code": "python"}, "code")) == "def f():\n\n    return 1"
    assert extract_answer(CODE, spec({"code": "py"}, "code")) == "def f():\n\n    return 1"
    assert extract_answer(CODE, spec({"code": "rust"}, "code")) == "x = 0"  # an unlabelled block may be in any language
    assert extract_answer("````md\n```py\nx\n```\n````", spec("code")) == "```py\nx\n```"
    assert extract_answer("```\nnever closed", spec("code")) is None


@pytest.mark.parametrize(
    ("extract", "field", "hint"),
    [
        ({"regex": "("}, "answer.extract.regex.regex", "not a regular expression"),
        ({"regex": "abc"}, "answer.extract.regex.regex", "it needs 1"),
        ({"regex": "(a)(b)"}, "answer.extract.regex.regex", "it needs 1"),
        ({"regex": "(x)" + "y" * 1000}, "answer.extract.regex.regex", "at most 1000"),
        ({"regex": "((((a{99}){99}){99}){99})"}, "answer.extract.regex.regex", "multiply to more than"),
        ({"code": "python; rm"}, "answer.extract.code.code", "should match pattern"),
        ({"regexp": "(a)"}, "answer.extract.regex.regexp", "Extra inputs"),
        ("box", "answer.extract.name", "'boxed'"),
    ],
)
def test_invalid_extraction_is_rejected_by_field(extract: object, field: str, hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build_spec({"problem": "?", "answer": {"extract": extract}})
    found = {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}
    assert hint in found[field], found


def test_bare_word_selects_the_comparison() -> None:
    job = build_spec({"problem": "?", "answer": "text"})
    assert job.answer == AnswerSpec(compare="text", extract="auto")
    assert JobSpec.model_validate_json(job.model_dump_json()).answer == job.answer
    with pytest.raises(ValidationError, match="'math', 'text', 'choice', 'code' or 'json'"):
        build_spec({"problem": "?", "answer": "maths"})
