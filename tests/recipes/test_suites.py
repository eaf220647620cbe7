"""Solutions of the bundled suites' problems and exact labels of their steps."""

from __future__ import annotations

import random

import pytest

from reasoner.evaluation.suites.countdown import after, can_reach, make_problem, moves
from reasoner.evaluation.suites.problem import Problem
from reasoner.evaluation.suites.registry import SUITES, get_family
from recipes.suites.countdown import odds
from recipes.suites.solutions import label_steps, sample_solution
from tests.seeds import shift


@pytest.mark.parametrize("name", SUITES)
def test_every_step_of_a_generated_solution_is_labelled_good(name: str) -> None:
    suite = get_family(name)
    for level in suite.LEVELS:
        for seed in range(60):
            problem = suite.generate_problem("train", seed, level)
            steps = sample_solution(problem, random.Random(shift(seed)))
            assert all(label_steps(problem, steps)), (problem, steps)
            assert len(steps) == int(level[1:]) + (0 if name == "countdown" else 1)


def test_word_problems_have_many_solution_paths() -> None:
    problem = get_family("words").generate_problem("heldout", 0, "s6")
    routes = {tuple(sample_solution(problem, random.Random(shift(seed)))) for seed in range(200)}
    assert len(routes) > 100
    assert len({route[-1] for route in routes}) == 1


def test_a_countdown_step_is_bad_once_the_target_is_unreachable() -> None:
    problem = make_problem([3, 7, 8, 12], 47)
    good = ["8 * 7 = 56, left 3 12 56", "12 - 3 = 9, left 56 9", "56 - 9 = 47, left 47", "\\boxed{(8 * 7) - (12 - 3)}"]
    assert label_steps(problem, good) == [True] * 4
    assert label_steps(problem, [*good[:3], "\\boxed{8 * 7 - 9}"]) == [True, True, True, False]
    assert label_steps(problem, ["8 * 7 = 54, left 3 12 54", *good[1:]]) == [False] * 4
    assert label_steps(problem, ["8 * 7 = 56, left 3 12", *good[1:]]) == [False] * 4
    assert label_steps(problem, ["8 * 6 = 48, left 3 12 48", *good[1:]]) == [False] * 4
    assert label_steps(problem, ["7 - 8 = 1, left 3 12 1"]) == [False]
    assert label_steps(problem, [good[0], "56 / 3 = 18, left 12 18"]) == [True, False]
    assert label_steps(problem, [good[0], "\\boxed{(8 * 7) - (12 - 3)}"]) == [True, False]
    assert label_steps(problem, ["", "hello", "\\boxed{"]) == [False] * 3
    assert label_steps(problem, []) == []


WORDS = Problem("", "words", "s3", "", "55", {"terms": [[1, 40], [-1, 15], [1, 3, 10]]})


def test_word_steps_use_each_quantity_once_with_its_sign() -> None:
    assert label_steps(WORDS, ["40 - 15 = 25", "3 * 10 = 30", "25 + 30 = 55", "\\boxed{55}"]) == [True] * 4
    assert label_steps(WORDS, ["10 * 3 = 30", "30 + 40 = 70", "70 - 15 = 55", "\\boxed{55}"]) == [True] * 4
    assert label_steps(WORDS, ["40 - 15 = 26", "3 * 10 = 30"]) == [False, False]
    assert label_steps(WORDS, ["40 + 15 = 55", "\\boxed{55}"]) == [False, False]
    assert label_steps(WORDS, ["40 - 15 = 25", "25 - 15 = 10"]) == [True, False]
    assert label_steps(WORDS, ["40 + 30 = 70"]) == [False]
    assert label_steps(WORDS, ["40 - 15 = 25", "\\boxed{55}"]) == [True, False]
    assert label_steps(WORDS, ["40 - 15 = 25", "3 * 10 = 30", "25 + 30 = 55", "\\boxed{56}"])[-1] is False


CRATES = Problem(
    "", "arithmetic", "o2", "", "5206", {"template": "crates", "numbers": {"a": 45570209, "b": 303701, "c": 9751}}
)


def test_an_operation_with_large_numbers_needs_the_results_that_it_uses() -> None:
    good = ["45570209 + 303701 = 45873910", "45873910 % 9751 = 5206", "\\boxed{5206}"]
    assert label_steps(CRATES, good) == [True] * 3
    assert label_steps(CRATES, [good[1], good[0], good[2]]) == [False] * 3
    assert label_steps(CRATES, [good[0], good[0]]) == [True, False]
    assert label_steps(CRATES, [good[0], good[2]]) == [True, False]
    assert label_steps(CRATES, [*good[:2], "\\boxed{5207}"]) == [True, True, False]
    assert label_steps(CRATES, ["45570209 + 303701 = 45873911", *good[1:]]) == [False] * 3


def test_the_success_probability_of_random_moves_sums_over_all_paths() -> None:
    def play(numbers: list[int], chance: float) -> dict[int, float]:
        if len(numbers) == 1:
            return {numbers[0]: chance}
        ends: dict[int, float] = {}
        options = list(moves(numbers))
        for a, _, b, result in options:
            for value, part in play(after(numbers, a, b, result), chance / len(options)).items():
                ends[value] = ends.get(value, 0.0) + part
        return ends

    ends = play([2, 3, 7, 10], 1.0)
    assert sum(ends.values()) == pytest.approx(1.0)
    for value, chance in ends.items():
        assert odds([10, 2, 7, 3], value) == pytest.approx(chance)
        assert can_reach([2, 3, 7, 10], value)
    assert odds([2, 3, 7, 10], 199) == ends.get(199, 0.0)
