"""Suites from files and from reasoning-gym: parsing, checking and errors."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reasoner.answers.equivalence import Equivalence
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.suite import Suite, SuiteError
from reasoner.jobs.messages import MAX_PROBLEM_CHARS

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_head.jsonl"
MATH = {
    "problem": "What is $\\frac{1}{2}+\\frac{1}{4}$?",
    "solution": "Common denominators: $\\frac{2}{4}+\\frac{1}{4}=\\boxed{\\frac{3}{4}}.$",
    "level": "Level 2",
    "type": "Prealgebra",
}


async def right(suite: Suite, problem: Problem, answer: str | None) -> bool:
    async with Equivalence() as equal:
        return await suite.check(problem, answer, equal)


def written(folder: Path, *lines: Any) -> str:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(path)


def test_gsm8k_answers_are_the_published_ones() -> None:
    suite = open_suite(str(GSM8K), limit=300)
    assert [problem.answer for problem in suite.problems] == ["18", "3", "70000", "540", "20", "64", "260", "160"]
    assert suite.problems[0].text.startswith("Janet\u2019s ducks lay 16 eggs per day.")
    assert "<<" not in suite.problems[0].text
    assert len({problem.id for problem in suite.problems}) == 8
    assert len(open_suite(str(GSM8K), limit=3).problems) == 3


@pytest.mark.parametrize(
    "answer",
    [
        "70000",
        "70,000",
        "$70,000$",
        "70000.00",
        "\\$70,000",
        "70000 \\text{ dollars}",
        "+70000",
        "7e4",
        "70{,}000",
        "seventy thousand",
    ],
)
async def test_a_number_is_right_in_every_notation(answer: str) -> None:
    suite = open_suite(str(GSM8K), limit=3)
    assert await right(suite, suite.problems[2], answer)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        "7000",
        "70000 or 80000",
        "7 0000",
        "seventy thousand and one",
        "70000/0",
        "-70000",
        "70000.5",
        "70000\\pi",
        "1/70000",
    ],
)
async def test_a_different_number_two_numbers_or_none_is_wrong(answer: str | None) -> None:
    suite = open_suite(str(GSM8K), limit=3)
    assert not await right(suite, suite.problems[2], answer)


async def test_math_takes_the_answer_from_the_last_box_and_compares_formulas(tmp_path: Path) -> None:
    plain = {
        "problem": "$1+1$?",
        "solution": "no box",
        "answer": "2",
        "subject": "Algebra",
        "level": 5,
    }
    suite = open_suite(written(tmp_path, MATH, b"", plain), limit=300)
    first, second = suite.problems
    assert (first.answer, first.level, first.data) == ("\\frac{3}{4}", "Level 2", {"subject": "Prealgebra"})
    assert (second.answer, second.level, second.data) == ("2", "5", {"subject": "Algebra"})
    assert (first.id[-2:], second.id[-2:]) == ("-1", "-3")
    for answer in ("0.75", "\\dfrac34", "3/4", "1-\\frac{1}{4}"):
        assert await right(suite, first, answer), answer
    assert not await right(suite, first, "\\frac{4}{3}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: not JSON"),
        (b'{"question": "\xff"}', "line 2: not UTF-8"),
        ([1], "line 2: list instead of a JSON object"),
        ({"question": "q"}, "line 2: field 'answer' is missing"),
        ({"question": "q", "answer": 4}, "line 2, field 'answer': 4 must be a text"),
        ({"question": "q", "answer": "four"}, "line 2, field 'answer': it must end with '#### NUMBER'"),
        ({"question": "q", "answer": "#### four"}, "line 2, field 'answer': it must end with '#### NUMBER'"),
        ({"question": " ", "answer": "#### 4"}, "line 2, field 'question'"),
        (
            {"question": "q" * (MAX_PROBLEM_CHARS + 1), "answer": "#### 4"},
            f"'question': {MAX_PROBLEM_CHARS + 1} char",
        ),
        (MATH, "line 2: field 'answer' is missing"),
    ],
)
def test_a_malformed_gsm8k_line_is_refused_with_its_number_and_field(line: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError) as caught:
        open_suite(written(tmp_path, {"question": "q", "answer": "#### 4"}, line), limit=300)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"solution": "nothing"}, "line 1, field 'solution': no \\boxed{}"),
        ({"solution": None}, "line 1, field 'solution': None must be a text"),
        ({"answer": ""}, "line 1, field 'answer'"),
        ({"level": [2]}, "line 1, field 'level': [2]"),
        ({"problem": 1}, "line 1, field 'problem'"),
    ],
)
def test_a_malformed_math_line_is_refused_with_its_number_and_field(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SuiteError) as caught:
        open_suite(written(tmp_path, MATH | change), limit=300)
    assert said in str(caught.value)


def test_an_unknown_suite_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    for where, said in (
        ("poems", "give countdown, words, arithmetic, extraction"),
        ("poems:x", "(livecodebench, humaneval, gpqa, aime, gsm8k, math, as in aime:FILE) or reasoning-gym:TASK"),
        (str(tmp_path / "none.jsonl"), "No such file"),
        (str(tmp_path), "Is a directory"),
        (written(tmp_path), "holds no problem"),
        (written(tmp_path, {"text": "?"}), "its fields are 'text'"),
    ):
        with pytest.raises(SuiteError) as caught:
            open_suite(where, limit=1)
        assert said in str(caught.value)


# reasoning-gym: a stand-in of its interface, and the package itself where it is installed.


@dataclasses.dataclass
class SumsConfig:
    seed: int = 0
    size: int = 0
    largest: int = 1000

    def __post_init__(self) -> None:
        if self.largest < 1:
            raise AssertionError("largest must be positive")


class Sums:
    """Questions ``seed+index?``, which repeat after ``largest``."""

    def __init__(self, config: SumsConfig) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert index < self.config.size
        index %= self.config.largest
        return {"question": f"{self.config.seed}+{index}?", "answer": str(self.config.seed + index), "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        if answer == "?":
            raise KeyError(answer)
        return 1.0 if answer == entry["answer"] else 0.5 if entry["answer"] in (answer or "") else 0.0


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the package by one with two tasks of the same shape."""
    module, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    module.__dict__["create_dataset"] = lambda task, **params: Sums(SumsConfig(**params))
    factory.__dict__["DATASETS"] = {"sums": (Sums, SumsConfig), "products": (Sums, SumsConfig)}
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


@pytest.mark.usefixtures("sums")
async def test_only_the_full_score_of_a_gym_task_is_right() -> None:
    suite = open_suite("reasoning-gym:sums", limit=3, seed=4)
    assert [problem.answer for problem in suite.problems] == ["4", "5", "6"]
    assert await right(suite, suite.problems[1], "5")
    assert not await right(suite, suite.problems[1], "it is 5")
    assert not await right(suite, suite.problems[1], "?")


@pytest.mark.usefixtures("sums")
def test_a_gym_task_takes_parameters_and_repeats_no_question() -> None:
    suite = open_suite("reasoning-gym:sums?largest=4", limit=30)
    assert suite.name == "reasoning-gym:sums?largest=4"
    assert [problem.text.partition("?")[0] for problem in suite.problems] == ["0+0", "0+1", "0+2", "0+3"]
    assert len(open_suite("reasoning-gym:sums?largest=4", limit=3).problems) == 3


@pytest.mark.usefixtures("sums")
def test_problems_of_other_seeds_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "__getitem__", lambda self, index: {"question": f"{index}?", "answer": "1"})  # any seed
    suite = open_suite("reasoning-gym:sums", limit=5, seed=9, apart_from=[0])
    assert [problem.text.partition("?")[0] for problem in suite.problems] == ["600", "601", "602", "603", "604"]


@pytest.mark.usefixtures("sums")
def test_shots_are_solved_problems_before_the_question() -> None:
    suite = open_suite("reasoning-gym:sums?largest=30&shots=2", limit=2)
    *shown, question = suite.problems[0].to_messages()
    assert [message["role"] for message in shown] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in shown] == [
        "1000001+0?", "The answer is 1000001.", "1000001+1?", "The answer is 1000002.",
    ]  # fmt: skip
    assert question == {"role": "user", "content": "0+0?"}
    (alone,) = open_suite("reasoning-gym:sums", limit=1).problems[0].to_messages()
    assert alone["content"] == "0+0?"
    assert (suite.answer_spec.instruct, open_suite("reasoning-gym:sums", limit=1).answer_spec.instruct) == (False, True)


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("sum", "no task 'sum'; near it: sums"),
        ("sums?smallest=1", "sums?smallest=1: no parameter 'smallest'; the task has largest, shots"),
        ("sums?largest", "'largest' is not KEY=VALUE; write TASK?KEY=VALUE&KEY=VALUE"),
        ("sums?largest=0", "cannot be made with largest=0: largest must be positive"),
        ("sums?largest=x", "cannot be made with largest='x': '<' not supported"),
        ("sums?shots=17", "shots=17 must be a whole number from 0 to 16"),
        ("sums?shots=some", "shots=some must be a whole number from 0 to 16"),
    ],
)
def test_a_wrong_task_or_parameter_is_named_with_the_known_ones(task: str, said: str) -> None:
    with pytest.raises(SuiteError) as caught:
        open_suite(f"reasoning-gym:{task}", limit=1)
    assert said in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="the package is installed")
def test_without_the_package_the_error_names_the_extra() -> None:
    with pytest.raises(SuiteError, match=r"pip install 'reasoner\[gym\]'"):
        open_suite("reasoning-gym:chain_sum", limit=1)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="the package is not installed")
async def test_the_packages_tasks_accept_their_own_answers() -> None:
    for task in ("chain_sum", "leg_counting", "countdown", "basic_arithmetic", "gcd"):
        suite = open_suite(f"reasoning-gym:{task}", limit=5, seed=1)
        assert len(suite.problems) == 5
        for problem in suite.problems:
            assert await right(suite, problem, problem.answer)
            assert not await right(suite, problem, "no idea")
