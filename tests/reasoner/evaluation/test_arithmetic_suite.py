"""Suite of word problems with large numbers: independent answers, and texts with all their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import pytest

from reasoner.evaluation.suites.arithmetic import LEVELS, check, generate_problem
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import open_suite
from reasoner.evaluation.suites.templates import TEMPLATES

Formula = Callable[..., Fraction]

FORMULAS: dict[str, Formula] = {
    "shipment": lambda a, b, c: b * a - c,
    "crates": lambda a, b, c: (a + b) - c * ((a + b) // c),
    "tax": lambda a, p: a * (100 - p) / 100,
    "schools": lambda a, b, c: (a + b) / c,
    "stock": lambda a, b, c: c * b + a,
    "pumps": lambda a, b, c: a * c - b * c,
    "product": lambda a, b, c: a * b - c,
    "harvest": lambda a, b, c, d: (a + b - c) / d,
    "tickets": lambda a, b, c, d: a * b + c * d,
    "income": lambda a, b, p: (a + b) * (100 - p) / 100,
    "packing": lambda a, b, c, d: (a * b - c) - d * ((a * b - c) // d),
    "budget": lambda a, b, c, d: a - (b * c + d),
    "sum": lambda a, b, c, d: a * c + b * c - d,
    "warehouse": lambda a, b, c, d, e: (a - d + b * c) / e,
    "factories": lambda a, b, c, d, e: (a * b + c * d) - e * ((a * b + c * d) // e),
    "club": lambda a, b, c, p: (a + b) * (100 - p) / 100 - c,
    "orchard": lambda a, b, c, d, e: a * b * d - c * d - e,
    "surplus": lambda a, b, c, d, e: (a * c - b * c + d) / e,
    "chain": lambda a, b, c, d, e: e - c * d + a * b,
}
"""Answers in fractions, written from the texts in another form than the suite's operations."""


def sample(count: int) -> list[Problem]:
    """Return problems of all levels and both splits."""
    return [
        generate_problem(split, f"test/{seed}", level)
        for seed in range(count)
        for split in ("train", "heldout")
        for level in LEVELS
    ]


def test_every_template_has_a_formula_and_is_generated() -> None:
    assert set(FORMULAS) == set(TEMPLATES)
    assert {problem.data["template"] for problem in sample(60)} == set(TEMPLATES)


def test_answers_are_those_of_an_independent_formula_in_fractions() -> None:
    for problem in sample(150):
        numbers = {slot: Fraction(number) for slot, number in problem.data["numbers"].items()}
        assert FORMULAS[problem.data["template"]](**numbers) == int(problem.answer) > 0, problem


def test_texts_hold_exactly_the_numbers_and_no_placeholder() -> None:
    for problem in sample(60):
        shown = sorted(map(int, re.findall(r"\d+", problem.text)))
        assert shown == sorted(problem.data["numbers"].values())
        assert not re.search(r"[{}]|  ", problem.text)


def test_a_level_is_the_number_of_operations_and_most_quantities_are_large() -> None:
    numbers = []
    for problem in sample(60):
        assert len(TEMPLATES[problem.data["template"]].operations) == int(problem.level[1:])
        assert max(problem.data["numbers"].values()) >= 1000
        assert max(problem.data["numbers"].values()) < 10**9
        numbers += problem.data["numbers"].values()
    assert sum(number >= 1000 for number in numbers) > 0.6 * len(numbers)


def test_a_problem_is_a_function_of_its_split_seed_and_level() -> None:
    assert generate_problem("heldout", 5, "o3") == generate_problem("heldout", 5, "o3")
    assert generate_problem("heldout", 5, "o3") != generate_problem("heldout", 6, "o3")


@pytest.mark.parametrize("name", TEMPLATES)
def test_wordings_of_a_template_use_all_its_numbers(name: str) -> None:
    template = TEMPLATES[name]
    for text in template.texts:
        slots = set(re.findall(r"\{([a-z])\}", text))
        assert slots == set(template.slots), text


@pytest.mark.parametrize("wrong", [None, "", "12.0", "-1065", "1,065", "\u0661\u0660\u0666\u0665", "9" * 5000])
def test_an_answer_is_a_whole_number(wrong: str | None) -> None:
    problem = next(problem for problem in sample(60) if problem.data["template"] == "tax")
    assert check(problem, problem.answer)
    assert check(problem, f" 0{problem.answer} ")
    assert not check(problem, wrong)


async def test_the_suite_is_opened_by_its_name() -> None:
    suite = open_suite("arithmetic", limit=6)
    assert [problem.level for problem in suite.problems] == [*LEVELS, *LEVELS]
    assert suite.answer_spec.compare == "text"
