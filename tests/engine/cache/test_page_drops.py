"""Pages of long thoughts are drawn at random, alike for all that have the same text, and never beyond the rules."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from scipy.stats import chisquare

from engine.cache.page_drops import PageDrops
from engine.protocol.request_checks import MIN_THOUGHT_PAGES
from engine.protocol.types import InvalidRequest, KeyBound
from tests.seeds import shift

SIZE = 4


def make(prompt: int, budget: int, *, seed: int = 1, end: tuple[int, ...] = ()) -> PageDrops:
    return PageDrops(KeyBound(budget, prompt, end, seed), SIZE)


def walk(drops: PageDrops, tokens: list[int], steps: random.Random | None = None) -> list[list[int]]:
    """Return the places in the text of the pages that are kept when each token is computed."""
    table: list[int] = []
    kept, computed = [], 0
    while computed < len(tokens):
        for place in drops.take_due(tokens, computed):
            del table[place]
        count = min(len(tokens) - computed, drops.count_until_next(computed), steps.randint(1, 9) if steps else 1)
        for position in range(computed, computed + count):
            if position % SIZE == 0:
                table.append(position // SIZE)
            kept.append(list(table))
        computed += count
    return kept


@pytest.mark.parametrize("case", range(20))
def test_the_prompt_the_latest_pages_and_the_budget_are_kept(case: int) -> None:
    dice = random.Random(shift(case))
    prompt, room = dice.randint(1, 40), dice.randint(MIN_THOUGHT_PAGES, 12)
    budget = (-(-prompt // SIZE) + room) * SIZE + dice.randint(0, SIZE - 1)
    tokens = dice.choices(range(50), k=400)
    kept = walk(make(prompt, budget), tokens)
    for position, pages in enumerate(kept):
        last = position // SIZE
        assert pages[: -(-prompt // SIZE)] == list(range(min(last + 1, -(-prompt // SIZE))))
        assert len(pages) * SIZE <= budget
        assert set(range(max(0, last - room // 2 + 1), last + 1)) <= set(pages)
    assert len(kept[-1]) < last + 1
    assert all(set(later) <= set(earlier) | {later[-1]} for earlier, later in pairwise(kept))


def test_steps_forks_and_repetitions_drop_the_same_pages() -> None:
    dice = random.Random(shift(3))
    tokens = dice.choices(range(50), k=300)
    whole = walk(make(10, 60), tokens)
    for case in range(10):
        assert walk(make(10, 60), tokens, steps=random.Random(shift(case))) == whole
    cut = dice.randint(100, 250)
    fork = tokens[:cut] + dice.choices(range(50, 99), k=100)
    assert walk(make(10, 60), fork)[:cut] == whole[:cut]
    drops = make(10, 60)
    walk(drops, tokens[:200])
    drops.reset()
    assert walk(drops, tokens) == whole


def test_other_seeds_and_other_texts_drop_other_pages() -> None:
    tokens = random.Random(shift(4)).choices(range(50), k=300)
    other = [*tokens[:12], 99, *tokens[13:]]
    found = [walk(drops, text)[-1] for drops, text in [(make(8, 80), tokens), (make(8, 80, seed=2), tokens)]]
    assert found[0] != found[1]
    assert walk(make(8, 80), other)[-1] != found[0]


def test_each_old_page_is_as_likely_to_be_dropped() -> None:
    """The first drop takes 3 of the 6 older pages of 12; chi-squared over 4,000 texts."""
    counts: Counter[int] = Counter()
    rounds = 4000
    for case in range(rounds):
        tokens = random.Random(shift(case)).choices(range(50), k=14 * SIZE)
        drops = make(2 * SIZE, 14 * SIZE, seed=case)
        counts.update(drops.take_due(tokens, 14 * SIZE))
    assert sorted(counts) == list(range(2, 8))
    # Draws of one text exclude each other, which makes the statistic smaller than independent ones would.
    assert chisquare(list(counts.values())).pvalue > 1e-4


def test_nothing_is_dropped_once_the_thought_has_ended() -> None:
    dice = random.Random(shift(5))
    tokens = dice.choices(range(50), k=300)
    end = (60, 61)
    for place in [*range(64, 84), 150]:
        closed = [*tokens[:place], *end, *tokens[place + 2 :]]
        kept = walk(make(8, 64, end=end), closed)
        assert kept[:place] == walk(make(8, 64, end=end), tokens)[:place]
        assert all(
            before == after[: len(before)] for before, after in zip(kept[place + 2 :], kept[place + 3 :], strict=False)
        )
    assert walk(make(8, 64, end=end), [60, 61, *tokens[2:]]) == walk(make(8, 64), [60, 61, *tokens[2:]])


def test_the_bill_of_parts_is_that_of_the_whole() -> None:
    drops = make(10, 60)
    kept = walk(drops, random.Random(shift(6)).choices(range(50), k=300))
    whole = drops.count_dropped(9, 299)
    assert whole == (-(-300 // SIZE) - len(kept[-1])) * SIZE
    assert whole == drops.count_dropped(9, 150) + drops.count_dropped(150, 299)


def test_a_budget_below_the_prompt_says_what_would_be_enough() -> None:
    for prompt, budget in [(100, 50), (100, 115), (1, 19)]:
        least = (-(-prompt // SIZE) + MIN_THOUGHT_PAGES) * SIZE
        with pytest.raises(InvalidRequest, match=f"give {least} at least") as caught:
            make(prompt, budget)
        assert caught.value.field == "kv_budget"
        make(prompt, least)
