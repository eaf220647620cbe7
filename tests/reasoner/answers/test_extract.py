"""Where a solution states its answer, and what half a solution states."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.answers.styles import STYLES, written
from reasoner import regex
from reasoner.answers.canonical import canonicalize
from reasoner.answers.extraction.extract import MAX_CHARS, extract_answer
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.extraction.phrases import ExtractionStopped, iter_announcements
from reasoner.answers.plain import decide_equal, parse_number
from reasoner.answers.spec import AnswerSpec
from reasoner.jobs.journal import MemoryJournal
from reasoner.jobs.spec import JobSpec
from reasoner.run import run_job
from reasoner.subprocess_pool import keep_workers_alive
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


SAID = {
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
        ("The answer is more than 5.", None),
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


@pytest.mark.parametrize("kind", SAID)
def test_an_answer_is_found_in_the_styles_of_models(kind: str) -> None:
    for text, answer in SAID[kind]:
        assert extract_answer(text) == answer, text


@pytest.mark.parametrize("kind", STYLES)
def test_every_style_of_the_benchmark_is_found_and_read_as_its_number(kind: str) -> None:
    for style in STYLES[kind]:
        for number in ("18", "1800", "-3", "2.5", "70000"):
            answer = extract_answer(written(style, number))
            assert answer is not None, style
            assert parse_number(answer) == Fraction(number), (style, answer)
            assert decide_equal(canonicalize(number), canonicalize(answer)), (style, answer)


def test_what_a_weak_sign_states_is_no_answer_before_the_end() -> None:
    """A step that mentions a number would end its branch."""
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


async def find(text: str, pattern: str, ended: ExtractionStopped = "end") -> str | None:
    return await AnswerFinder(spec({"regex": pattern})).find(text, ended)


async def test_a_pattern_takes_the_group_of_its_last_match() -> None:
    with keep_workers_alive():
        assert await find("<a>1</a><a>2</a>", "<a>(.*?)</a>") == "2"
        assert await find("<a> 1 </a><think><a>2</a>", "<a>(.*?)</a>") is None
        assert await find("<think><a>2</a></think><a> 1 </a>", "<a>(.*?)</a>") == "1"
        assert await find("no", "<a>(.*?)</a>") is None
        assert await find("yes", "yes|(no)") is None
        assert await find("a=1", r"a=(\d+)", "inside") is None
        assert await find("a=1 ", r"a=(\d+)", "inside") == "1"
        assert await find("a=" + "1" * 64_001, r"a=(\d+)") is None


async def test_a_pattern_that_backtracks_for_ever_finds_nothing_and_the_next_one_finds_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regex, "CPU_SECONDS", 0.1)
    with keep_workers_alive():
        assert await find("x" * 5000, "(x+x+)+y") is None  # it would take longer than the age of the universe
        assert await find("x" * 5000, "(x)") == "x"


def test_a_pattern_is_never_searched_for_in_the_own_process() -> None:
    with pytest.raises(ValueError, match="child process"):
        extract_answer("a", spec({"regex": "(a)"}))


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
def test_half_an_answer_is_none(text: str, ended: ExtractionStopped, answer: str | None) -> None:
    assert extract_answer(text, stopped=ended) == answer


def test_a_code_block_that_a_step_ends_in_is_no_answer_yet() -> None:
    assert extract_answer("```python\ndef f():\n\n", spec("code"), "step") is None
    assert extract_answer("The answer is B", spec(compare="choice"), "inside") is None
    assert extract_answer("The answer is (B)", spec(compare="choice"), "inside") == "B"
    assert extract_answer("Consider\nB\n\n", spec(compare="choice"), "step") is None


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
    "unit",
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
)
@pytest.mark.parametrize("compare", ["math", "text", "choice", "code"])
def test_a_model_that_repeats_itself_costs_no_more_than_its_length(unit: str, compare: str) -> None:
    """Matching that goes back takes longer than the runner allows a test."""
    for text in (unit * (600_000 // len(unit)), "The answer is " + unit * (600_000 // len(unit))):
        answer = extract_answer(text, spec(compare=compare))
        assert answer is None or len(answer) <= MAX_CHARS


class _Searched(str):
    """A text that counts the characters that are searched in it from the right."""

    searched = 0

    def lower(self) -> _Searched:
        return self

    def rfind(self, cue: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        at = str(self).rfind(cue, start, end)
        _Searched.searched += (len(self) if end is None else end) - max(at, 0)
        return at


def test_words_that_announce_an_answer_are_looked_for_once_in_each_character() -> None:
    text = _Searched("答案是18。\n" + "transfer " * 10_000)
    assert iter_announcements(text) == [0]
    assert _Searched.searched <= 2 * len(text)  # once for each of two words


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
