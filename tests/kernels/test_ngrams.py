"""The table of n-grams does natively what it does without numba, and keeps what it should of what it reads."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kernels.cpu.ngrams.table import WIDTH, mix
from kernels.ngrams import ENTRIES, TEXTS, Found, NgramTable

SCOPE, SEARCH = 1234567890123456789, 1234567890
"""Fixed, unlike names' hashes: which entries of a small table push out which depends on them."""


def row(
    place: int, new: list[int], shape: tuple[int, int] = (0, 0), start: tuple[int, int, int] | None = None
) -> list[int]:
    return [place if start is None else ~place, len(new), *shape, *(start or ()), *new]


def read(table: NgramTable, text: list[int]) -> None:
    """As a branch of its own."""
    place = table.take()
    table.learn_and_guess(row(place, text, start=(SCOPE, SEARCH, 0)), 1, 0, 0, 0.0)
    table.leave(place)


def guess(table: NgramTable, last: int, depth: int = 1, nodes: int = 1, least: float = 0.0) -> Found:
    """What follows a token; nothing is learned."""
    place = table.take()
    found = table.learn_and_guess(row(place, [last], (depth, nodes), (SCOPE, SEARCH, 0)), 1, nodes, nodes, least)
    table.leave(place)
    total = sum(found.counts)
    return Found(found.counts, found.tokens[:total], found.parents[:total], found.chances[:total])


def draw(table: NgramTable, first: int, then: int) -> None:
    """A branch has guesses after its first token, and then draws another one."""
    place = table.take()
    table.learn_and_guess(row(place, [first], (1, 1), (SCOPE, SEARCH, 0)), 1, 1, 1, 0.0)
    table.learn_and_guess(row(place, [then]), 1, 0, 0, 0.0)
    table.leave(place)


def test_of_many_followers_the_rarest_goes_and_of_these_the_oldest() -> None:
    table = NgramTable(64, 64)
    for token in (1, 1, 2, 3, 3, 4, 5, 6):
        read(table, [0, token])
    assert sorted(guess(table, 0, 1, 9).tokens) == [1, 3, 4, 5, 6]
    assert guess(table, 0, 1, 9).tokens[:2] == (3, 1)
    assert guess(table, 0, 1, 9).chances[0] == pytest.approx(0.5 * 2 / 8)
    assert WIDTH == 5


def test_what_was_added_to_longest_ago_makes_room() -> None:
    """Of texts that fill the table ten times over, the last are known, and of the earlier ones what comes again."""
    table = NgramTable(1 << 10, 1 << 10)
    texts = [list(range(100 * number, 100 * number + 50)) for number in range(50)]
    for text in texts:
        read(table, [7, 7, *text])
        read(table, [9_999, 9_998])
    known = [sum(guess(table, token).tokens == (after,) for token, after in pairwise(text)) for text in texts]
    assert known[-2:] == [49, 49]
    assert sum(known[:40]) == 0
    assert guess(table, 9_999).tokens == (9_998,)


def test_the_default_table_takes_as_much_memory_as_it_says() -> None:
    held = sum(each.nbytes for each in NgramTable()._arrays)
    assert (ENTRIES, TEXTS) == (1 << 18, 1 << 17)
    assert held == pytest.approx(21 * 2**20, rel=0.01)


def test_what_is_often_written_is_forgotten_when_something_else_is() -> None:
    table = NgramTable(64, 64)
    for _ in range(5000):
        read(table, [0, 1])
    offered = []
    for _ in range(1024):
        offered += guess(table, 0).tokens
        read(table, [0, 2])
    assert offered == sorted(offered)
    assert 200 < offered.count(1) < 1024


def test_only_what_is_judged_changes_the_chances() -> None:
    table = NgramTable(64, 64)
    for _ in range(200):
        read(table, [5, 6])
    read(table, [5, 7])
    assert guess(table, 5).chances == pytest.approx((0.5 * 200 / 201,))
    for _ in range(9):
        draw(table, 5, 6)
    draw(table, 5, 8)
    assert guess(table, 5).tokens == (6,)
    assert guess(table, 5).chances == pytest.approx((10 / 12 * 209 / 211,))


def test_no_guess_is_made_that_is_met_with_less_than_the_least_chance() -> None:
    table = NgramTable(64, 64)
    read(table, [5, 6, 7, 8, 9])
    assert guess(table, 5, 3, 3).chances == pytest.approx((0.5, 0.5, 0.5))
    assert guess(table, 5, 3, 3, 0.25).tokens == (6, 7)
    assert guess(table, 5, 3, 3, 0.51).tokens == ()


def test_hashes_differ_for_texts_that_differ() -> None:
    """A million texts of one to three tokens, and no two of them meet."""
    hashes = {mix(mix(mix(SCOPE, a), b), c) for a in range(100) for b in range(100) for c in range(100)}
    assert len(hashes) == 10**6
    assert all(0 <= one < 1 << 62 for one in hashes)
