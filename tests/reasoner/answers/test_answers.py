"""Answers: canonical forms, equivalence, votes."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasoner.answers import equivalence as equivalence_module
from reasoner.answers.canonical import canonicalize
from reasoner.answers.equivalence import Equivalence
from reasoner.answers.spec import AnswerSpec
from reasoner.answers.votes import count_votes, group_equivalent
from reasoner.jobs.journal import Entry, MemoryJournal
from reasoner.run import run_job
from reasoner.tree import Node
from tests.scripted import ANSWER, TEXTS, ScriptedEngine
from tests.specs import build_spec

MATH, TEXT = AnswerSpec(compare="math"), AnswerSpec(compare="text")


def leaf(index: int, answer: str | None) -> Node:
    return Node(path=(index,), parent=None, prefix=(), answer=answer)


@pytest.mark.parametrize("written", ["7", "7.0", "07", "$7$", " 7 ", "14/2", "7.", "+7"])
def test_equal_plain_numbers_have_one_canonical_form(written: str) -> None:
    assert canonicalize(written) == "7"


def test_thousands_separators_are_removed_and_other_commas_kept() -> None:
    assert canonicalize("1,000") == "1000"
    assert canonicalize("(1, 2)") == "(1,2)"
    assert canonicalize("1, 200") != canonicalize("1,200")
    assert canonicalize("2 3", "text") == "2 3"
    assert canonicalize("1, 200", "text") != "1200"
    assert canonicalize("1,200", "text") == "1200"


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=50))
def test_a_fraction_and_its_canonical_form_are_the_same_number(value: object) -> None:
    assert canonicalize(str(value)) == str(value)


def test_division_by_zero_is_compared_as_text() -> None:
    assert canonicalize("1/0") == "1/0"


async def test_equal_formulas_share_a_vote_class_and_a_missing_answer_abstains() -> None:
    nodes = [leaf(0, "\\frac{1}{2}"), leaf(1, None), leaf(2, "0.5"), leaf(3, "3"), leaf(4, "\\frac12")]
    async with Equivalence() as equal:
        groups = await group_equivalent(nodes, MATH, equal)
    assert [[node.path[0] for node in group] for group in groups] == [[0, 2, 4], [3]]


@pytest.mark.usefixtures("no_workers")
async def test_no_vote_class_holds_two_plainly_different_answers() -> None:
    """3 cm and 3 m are both equal to 3, and 50 and 1/2 to 50%."""
    nodes = [leaf(index, answer) for index, answer in enumerate(["3", "3 cm", "3 m", "3 cm", "50%", "0.5", "50", "$3"])]
    async with Equivalence() as equal:
        groups = await group_equivalent(nodes, MATH, equal)
        assert not equivalence_module.POOL.idle_workers  # none of it needs algebra
    assert [[node.path[0] for node in group] for group in groups] == [[0, 1, 3], [2], [4, 5], [6], [7]]


async def test_text_answers_are_compared_without_spaces_and_never_evaluated() -> None:
    async with Equivalence() as equal:
        groups = await group_equivalent([leaf(0, "3 + 4"), leaf(1, "3+4"), leaf(2, "7")], TEXT, equal)
    assert [len(group) for group in groups] == [2, 1]


def test_the_class_with_the_largest_weight_wins_and_a_tie_goes_to_the_first() -> None:
    a, b, c = leaf(0, "1"), leaf(1, "2"), leaf(2, "2")
    ranked = count_votes([[a], [b, c]], {a: 0.9, b: 0.5, c: 0.4})
    assert [(vote.answer, vote.count) for vote, _ in ranked] == [("1", 1), ("2", 2)]
    ranked = count_votes([[a], [b, c]], {a: 0.9, b: 0.5, c: 0.5})
    assert ranked[0][0].answer == "2"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("10{,}000", "10,000", True),
        ("\\text{yes}", "Yes", True),
        ("\\left(1, 2\\right)", "(1,2)", True),
        ("−5", "-5", True),  # noqa: RUF001
        ("５", "5", True),  # noqa: RUF001
        ("½", "1/2", True),
        ("x²", "x^{2}", True),
        ("50\\%", "1/2", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("(1,2)", "(2,1)", False),
        ("[1,2)", "[1,2]", False),
        ("x=5", "5", True),
        ("5\\text{ cm}", "5", True),
        ("\\sin^2 x+\\cos^2 x", "1", True),
        ("(-\\infty, 3]", "x \\le 3", True),
        ("study", "dusty", False),
        ("1/0", "2/0", False),
        ("10^{10^{10}}", "10^{10^{11}}", False),
        ("100000!", "1", False),
        ("9" * 5000, "9" * 5000 + "1", False),
        ("$" * 50, "1", False),
        ("\x00", "1", False),
    ],
)
async def test_comparing_formulas_is_symmetric(a: str, b: str, same: bool) -> None:
    async with Equivalence() as equal:
        assert await equal.equal(canonicalize(a), canonicalize(b)) is same
        assert await Equivalence.equal(equal, canonicalize(b), canonicalize(a)) is same


@given(st.text(max_size=300))
def test_canonicalization_of_any_output_is_idempotent(text: str) -> None:
    for compare in ("math", "text", "choice", "code"):
        once = canonicalize(text, compare)  # type: ignore[arg-type]
        assert canonicalize("9" * 5000 + text, compare)  # type: ignore[arg-type]
        if compare in ("choice", "code"):
            assert canonicalize(once, compare) == once  # type: ignore[arg-type]


def test_a_choice_is_reduced_to_its_letter_and_code_to_its_lines() -> None:
    assert {canonicalize(text, "choice") for text in ("(b)", "B", "\\text{B}", "B. Paris")} == {"B"}
    assert canonicalize("\n\ndef f():\n    return 1  \n\n", "code") == "def f():\n    return 1"
    assert canonicalize("if a:\n  b", "code") != canonicalize("if a:\n b", "code")


async def test_plainly_different_answers_are_decided_without_algebra() -> None:
    """Compares all pairs of 64 different forms; with algebra this would take minutes."""
    forms = [f"{i}\\sqrt{{{j}}}+x" for i in range(2, 18) for j in (2, 3, 5, 7)]
    nodes = [leaf(index, form) for index, form in enumerate(forms)]
    async with Equivalence() as equal:
        assert len(await group_equivalent(nodes, MATH, equal)) == 64


async def test_after_too_many_timeouts_a_job_makes_no_further_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence_module, "MAX_LATE", 2)
    asked: list[object] = []

    async def late(question: object, patience: float) -> None:
        asked.append(question)

    monkeypatch.setattr(equivalence_module.POOL, "call", late)
    equal = Equivalence()
    for letter in "abcdefgh":
        assert not await equal.equal(f"{letter}+1", f"1+{letter}")
    assert len(asked) == 2


async def test_a_replay_uses_the_recorded_verdicts_not_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXTS, ANSWER, "\\boxed{x+%d}")
    spec = build_spec({"problem": "?", "strategy": {"name": "self_consistency", "n": 8}, "seed": 1})
    journal = MemoryJournal()
    first = await run_job(spec, ScriptedEngine(order=1), journal)
    settled = [entry for entry in journal.entries if entry.type == "settled"]
    assert settled
    assert len(first.result.votes) > 1
    monkeypatch.setattr(Equivalence, "_first_equal", None)  # another comparison would fail
    again = MemoryJournal(journal.entries[:-1])
    assert (await run_job(spec, ScriptedEngine(order=2), again)).result == first.result
    lie = [
        Entry(e.key, e.type, e.data | {"value": "x"}, e.spend, e.elapsed) if e is settled[0] else e
        for e in journal.entries
    ]
    assert (await run_job(spec, ScriptedEngine(order=2), MemoryJournal(lie[:-1]))).result.votes == first.result.votes


async def test_a_comparison_that_hangs_is_killed_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Equivalence() as equal:
        assert await equal.equal("x+1", "1+x")
        (child,) = equivalence_module.POOL.idle_workers
        monkeypatch.setattr(equivalence_module, "CPU_SECONDS", 0.3)
        assert not await equal.equal("9^{9^{9^{9^{9}}}}", "8^{8^{8^{8^{8}}}} + y")
        assert child.process.returncode is not None
        monkeypatch.setattr(equivalence_module, "CPU_SECONDS", 30.0)
        assert await equal.equal("y+1", "1+y")


async def test_concurrent_comparisons_are_queued() -> None:
    async with Equivalence() as equal:
        pairs = [(f"{letter}+1", f"1+{letter}") for letter in "abcd"] + [("x+1", "x+2")]
        assert await asyncio.gather(*(equal.equal(a, b) for a, b in pairs)) == [True] * 4 + [False]


@pytest.mark.usefixtures("no_workers")
async def test_plain_numbers_never_start_a_worker() -> None:
    async with Equivalence() as equal:
        assert not await equal.equal("7", "1/3")
        assert equivalence_module.POOL.idle_workers == []


@pytest.mark.usefixtures("no_workers")
async def test_the_worker_ends_after_the_comparison() -> None:
    async with Equivalence() as equal:
        await equal.equal("x", "y")
        (child,) = equivalence_module.POOL.idle_workers
    assert child.process.returncode is not None
