"""Suites: strict checkers and disjoint splits."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from reasoner.evaluation.suites import arithmetic, countdown, words
from reasoner.evaluation.suites.problem import Problem, split_of
from reasoner.evaluation.suites.registry import SUITES, check_answer, get_family, load_problems
from tests.long import mostly_long
from tests.seeds import shift


def four(numbers: list[int], target: int) -> Problem:
    return countdown.make_problem(numbers, target)


def brute_force(values: tuple[int, ...]) -> set[int]:
    """Return every value reachable with all numbers, by a second implementation without memo, masks or ordering."""
    if len(values) == 1:
        return {values[0]}
    found: set[int] = set()
    for i, j in itertools.permutations(range(len(values)), 2):
        rest = tuple(v for k, v in enumerate(values) if k not in (i, j))
        a, b = values[i], values[j]
        for result in (Fraction(a + b), Fraction(a - b), Fraction(a * b), Fraction(a, b)):
            if result.denominator == 1 and 0 < result <= countdown.LIMIT:
                found |= brute_force((*rest, int(result)))
    return found


def test_reachable_values_equal_brute_force() -> None:
    rng = random.Random(shift(5))
    for size in (2, 3, 3, 3, 4, 4):
        numbers = tuple(sorted(rng.randint(1, 12) for _ in range(size)))
        mask = countdown.reachable(numbers)
        assert {v for v in range(mask.bit_length()) if mask >> v & 1} == brute_force(numbers)


@pytest.mark.parametrize("name", SUITES)
def test_load_is_deterministic_balanced_distinct_and_a_prefix_of_a_larger_load(name: str) -> None:
    problems = load_problems(name, limit=45)
    assert problems == load_problems(name, limit=60)[:45]
    assert len({problem.id for problem in problems}) == 45
    levels = get_family(name).LEVELS
    assert [problem.level for problem in problems] == [levels[i % len(levels)] for i in range(45)]
    assert load_problems(name, limit=10, seed=1) != problems[:10]
    assert load_problems(name, limit=0) == []
    assert all(problem.suite == name and check_answer(problem, problem.answer) for problem in problems)


def test_unknown_suite_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown suite 'sudoku'; known suites: countdown, words, arithmetic"):
        load_problems("sudoku")
    with pytest.raises(ValueError, match="limit"):
        load_problems("words", limit=-1)


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("seeds", mostly_long([range(5), range(5, 20)], every=2), ids=["few", "more"])
def test_splits_are_disjoint_by_canonical_problem(name: str, seeds: range) -> None:
    def key(problem: Problem) -> str:
        if name == "countdown":
            return countdown.canonical(problem.data["numbers"], problem.data["target"])
        if name == "arithmetic":
            return arithmetic.canonical(problem.data["template"], problem.data["numbers"])
        return words.canonical([tuple(term) for term in problem.data["terms"]])

    suite = get_family(name)
    keys = {
        split: {key(suite.generate_problem(split, seed, level)) for level in suite.LEVELS for seed in seeds}
        for split in ("train", "heldout")
    }
    assert not keys["train"] & keys["heldout"]
    assert {split_of(k) for k in keys["train"]} == {"train"}
    assert {split_of(k) for k in keys["heldout"]} == {"heldout"}


def test_wording_and_order_do_not_change_the_split_of_a_countdown_problem() -> None:
    assert countdown.canonical([3, 7, 8, 12], 45) == countdown.canonical([12, 3, 8, 7], 45)


def test_countdown_answers_are_checked_by_the_rules_of_the_game() -> None:
    problem = four([3, 7, 8, 12], 47)
    assert check_answer(problem, "(7 * 8) + 3 - 12")
    assert check_answer(problem, " 7*8-(12-3) ")
    for wrong in (
        None, "", "47", "7 * 8 - 9", "(7 * 8) + 3", "(7 * 8) + 3 - 12 + 12 - 12", "7 * 8 - 12 + 3.0",
        "-(12 - 3) + 7 * 8",
        "7 ** 8", "__import__('os').getpid()", "7 * 8 - 12 + 3 == 47", "3 / 0", "(" * 150, "1" * 500,
        "[7][0] * 8 - 12 + 3",
        "True * 7 * 8 - 12 + 3", "lambda: 47", "7 * 8 - 12 + 3)",
    ):  # fmt: skip
        assert not check_answer(problem, wrong), wrong
    assert check_answer(four([3, 8, 12], 4), "12 / (8 - 3) * 0 + 4") is False


def test_countdown_allows_exact_fractions_in_an_answer() -> None:
    problem = four([2, 3, 8, 12], 24)
    assert check_answer(problem, "(8 * 2 + 12 - 12 / 3)") is False
    assert check_answer(Problem("", "countdown", "n3", "", "", {"numbers": [3, 2, 8], "target": 12}), "3 / 2 * 8")


WORDS = Problem("", "words", "s3", "", "55", {"terms": [[1, 40], [-1, 15], [1, 3, 10]]})


def test_word_answers_are_integers() -> None:
    assert check_answer(WORDS, "55")
    assert check_answer(WORDS, " 055 ")
    for wrong in (None, "", "5 5", "55.0", "-55", "\u00b2", "\u0665\u0665", "9" * 5000):
        assert not check_answer(WORDS, wrong)
