"""Where a solution states its answer, and what half a solution states."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reasoner.answer_spec import AnswerSpec
from reasoner.answers import extract_answer
from reasoner.answers.extract import Ended
from reasoner.jobs import JobSpec
from reasoner.journal import MemoryJournal
from reasoner.run import run_job
from tests.scripted import ScriptedEngine


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
def test_the_last_complete_box_is_the_answer(text: str, answer: str | None) -> None:
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
def test_mathematics_takes_a_box_then_a_hash_then_a_phrase(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
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
def test_a_choice_is_found_in_its_usual_forms(text: str, answer: str | None) -> None:
    assert extract_answer(text, spec(compare="choice")) == answer


CODE = "Draft:\n```\nx = 0\n```\nBetter:\n```python\ndef f():\n\n    return 1\n```\nand a shell:\n```sh\nls\n```\n"


def test_code_is_the_last_closed_block_of_its_language() -> None:
    assert extract_answer(CODE, spec(compare="code")) == "ls"
    assert extract_answer(CODE, spec({"code": "python"}, "code")) == "def f():\n\n    return 1"
    assert extract_answer(CODE, spec({"code": "py"}, "code")) == "def f():\n\n    return 1"
    assert extract_answer(CODE, spec({"code": "rust"}, "code")) == "x = 0"  # a block without a name may be anything
    assert extract_answer("````md\n```py\nx\n```\n````", spec("code")) == "```py\nx\n```"
    assert extract_answer("```\nnever closed", spec("code")) is None


def test_a_pattern_takes_the_group_of_its_last_match() -> None:
    assert extract_answer("<a>1</a><a>2</a>", spec({"regex": "<a>(.*?)</a>"})) == "2"
    assert extract_answer("no", spec({"regex": "<a>(.*?)</a>"})) is None
    assert extract_answer("yes", spec({"regex": "yes|(no)"})) is None


def test_a_pattern_that_backtracks_for_ever_finds_nothing_in_bounded_time() -> None:
    began = time.process_time()
    assert extract_answer("x" * 5000, spec({"regex": "(x+x+)+y"})) is None
    assert time.process_time() - began < 30  # it would take longer than the age of the universe


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
def test_a_wrong_extraction_is_refused_by_name(extract: object, field: str, hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({"problem": "?", "answer": {"extract": extract}})
    found = {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}
    assert hint in found[field], found


def test_a_word_is_short_for_how_answers_are_compared() -> None:
    job = JobSpec.model_validate({"problem": "?", "answer": "text"})
    assert job.answer == AnswerSpec(compare="text", extract="auto")
    assert JobSpec.model_validate_json(job.model_dump_json()).answer == job.answer
    with pytest.raises(ValidationError, match="'math', 'text', 'choice' or 'code'"):
        JobSpec.model_validate({"problem": "?", "answer": "maths"})


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
def test_half_an_answer_is_none(text: str, ended: Ended, answer: str | None) -> None:
    assert extract_answer(text, ended=ended) == answer


def test_a_code_block_that_a_step_ends_in_is_no_answer_yet() -> None:
    assert extract_answer("```python\ndef f():\n\n", spec("code"), "step") is None
    assert extract_answer("The answer is B", spec(compare="choice"), "inside") is None
    assert extract_answer("The answer is (B)", spec(compare="choice"), "inside") == "B"
    assert extract_answer("Consider\nB\n\n", spec(compare="choice"), "step") is None
    assert extract_answer("a=1", spec({"regex": r"a=(\d+)"}), "inside") is None


FORMS = st.sampled_from(
    ["\\boxed{12}", "the answer is 12.5.\n", "#### 125\n", "```\nx = 12\n```\n", "(C) is correct. "]
)


@given(st.lists(FORMS, min_size=1, max_size=3), st.sampled_from(["math", "choice", "code"]), st.data())
def test_no_prefix_states_what_the_whole_does_not(forms: list[str], compare: str, data: st.DataObject) -> None:
    """Cut anywhere, a text states one of the answers that are in it, never a part of one."""
    text = "So\n".join(forms)
    cut = data.draw(st.integers(0, len(text)))
    stated = extract_answer(text[:cut], spec(compare=compare), "inside")
    assert stated in {"math": {"12", "12.5", "125"}, "choice": {"C"}, "code": {"x = 12"}}[compare] | {None}


@pytest.mark.parametrize(
    "unit", [" ", "\n", "the answer is ", "\\boxed{", "#### ", "```\n", "(", "A ", "final answer", "{"]
)
@pytest.mark.parametrize("compare", ["math", "text", "choice", "code"])
def test_a_model_that_repeats_itself_costs_no_more_than_its_length(unit: str, compare: str) -> None:
    text = unit * (60_000 // len(unit))
    began = time.process_time()
    extract_answer(text, spec(compare=compare))
    assert time.process_time() - began < 10  # quadratic matching takes minutes


async def test_a_job_extracts_as_it_was_asked_to() -> None:
    body = {"problem": "?", "strategy": {"name": "self_consistency", "n": 8}, "seed": 2}
    outcome = await run_job(
        JobSpec.model_validate(body | {"answer": {"compare": "text", "extract": {"regex": r"(w\d)\d* "}}}),
        ScriptedEngine(),
        MemoryJournal(),
    )
    assert outcome.result.answer is not None
    assert outcome.result.answer.startswith("w")
    hashes = JobSpec.model_validate(body | {"answer": {"extract": "hash"}})
    assert (await run_job(hashes, ScriptedEngine(), MemoryJournal())).status == "incomplete"
