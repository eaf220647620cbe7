"""Answers: extraction, canonical forms, equivalence, votes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner import equivalence as equivalence_module
from reasoner.answers import canonical, classes, extract_answer, votes
from reasoner.equivalence import Equivalence
from reasoner.tree import Node


def leaf(index: int, answer: str | None) -> Node:
    return Node(path=(index,), parent=None, prefix=(), answer=answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{42}", "42"),
        ("\\boxed{1} no, \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{7} and then \\boxed{8", "7"),
        ("\\boxed{ }", None),
        ("\\boxed{", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("written", ["7", "7.0", "07", "$7$", " 7 ", "14/2", "7.", "+7"])
def test_plain_numbers_that_are_equal_have_one_form(written: str) -> None:
    assert canonical(written) == "7"


def test_thousands_separators_are_understood_and_other_commas_kept() -> None:
    assert canonical("1,000") == "1000"
    assert canonical("(1, 2)") == "(1,2)"


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=50))
def test_a_fraction_and_its_canonical_form_are_the_same_number(value: object) -> None:
    assert canonical(str(value)) == str(value)


def test_division_by_zero_is_an_answer_like_any_other_text() -> None:
    assert canonical("1/0") == "1/0"


async def test_equal_mathematics_votes_together_and_no_answer_abstains() -> None:
    nodes = [leaf(0, "\\frac{1}{2}"), leaf(1, None), leaf(2, "0.5"), leaf(3, "3"), leaf(4, "\\frac12")]
    async with Equivalence() as equal:
        groups = await classes(nodes, "math", equal)
    assert [[node.path[0] for node in group] for group in groups] == [[0, 2, 4], [3]]


async def test_text_answers_are_compared_without_their_spaces_and_not_calculated() -> None:
    async with Equivalence() as equal:
        groups = await classes([leaf(0, "3 + 4"), leaf(1, "3+4"), leaf(2, "7")], "text", equal)
    assert [len(group) for group in groups] == [2, 1]


def test_the_heaviest_class_wins_and_of_equal_ones_the_first() -> None:
    a, b, c = leaf(0, "1"), leaf(1, "2"), leaf(2, "2")
    ranked = votes([[a], [b, c]], {a: 0.9, b: 0.5, c: 0.4})
    assert [(vote.answer, vote.count) for vote, _ in ranked] == [("1", 1), ("2", 2)]
    ranked = votes([[a], [b, c]], {a: 0.9, b: 0.5, c: 0.5})
    assert ranked[0][0].answer == "2"


async def test_a_comparison_that_never_ends_is_killed_and_the_next_one_still_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Equivalence() as equal:
        assert await equal.equal("x+1", "1+x")
        child = equal._child
        assert child is not None
        monkeypatch.setattr(equivalence_module, "PATIENCE", 0.3)
        assert not await equal.equal("9^{9^{9^{9^{9}}}}", "8^{8^{8^{8^{8}}}} + y")
        assert child.returncode is not None
        monkeypatch.setattr(equivalence_module, "PATIENCE", 30.0)
        assert await equal.equal("y+1", "1+y")


async def test_plain_numbers_never_start_the_child() -> None:
    async with Equivalence() as equal:
        assert not await equal.equal("7", "1/3")
        assert equal._child is None


async def test_the_child_is_gone_when_the_comparison_is_over() -> None:
    async with Equivalence() as equal:
        await equal.equal("x", "y")
        child = equal._child
    assert child is not None
    assert await asyncio.wait_for(child.wait(), 5) is not None
