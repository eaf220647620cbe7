"""Paged KV cache: matched prefixes hold the computed values, and no page is lost or shared by mistake."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.attention.layer import HeadShape
from engine.cache.page_table import PageTable
from engine.cache.paged_kv import KVCache
from engine.cache.pages import PagePool
from tests.engine.simulation import PAGE, marks, read_marks, write_marks
from tests.seeds import shift

PAGES, ROWS = 14, 5
CONTEXT = PAGES * PAGE


def make_cache(pages: int = PAGES, max_pinned: int = PAGES // 2, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(
        layers=[HeadShape(1, 1, 1)],
        pages=pages,
        page_size=PAGE,
        rows=ROWS,
        context=CONTEXT,
        max_pinned=max_pinned,
        dtype=dtype,
    )


@dataclass
class Running:
    """A running sequence, driven as by the engine."""

    cache: KVCache
    tokens: list[int]
    table: PageTable
    num_computed: int

    @classmethod
    def open(cls, cache: KVCache, tokens: list[int], namespace: str | None = None) -> Running:
        table = cache.open_table(cache.match_prefix(tokens, len(tokens) - 1, namespace), namespace)
        running = cls(cache, tokens, table, table.num_cached_tokens)
        running.check_content()
        return running

    def compute(self, count: int, *, include_partial: bool = False) -> bool:
        count = min(count, len(self.tokens) - self.num_computed)
        if not self.cache.reserve(self.table, self.num_computed + count):
            return False
        write_marks(self.cache, self.table, self.tokens, self.num_computed, self.num_computed + count)
        self.num_computed += count
        self.cache.publish(self.table, self.tokens, self.num_computed, include_partial=include_partial)
        return True

    def check_content(self) -> None:
        expected = marks(self.table.namespace, self.tokens[: self.num_computed])
        assert read_marks(self.cache, self.table, self.num_computed) == expected

    def close(self, pin_key: str | None = None) -> None:
        end = self.cache.publish(self.table, self.tokens, self.num_computed, include_partial=True)
        self.cache.close_table(self.table)
        if pin_key is not None and end is not None:
            self.cache.pins.pin(pin_key, self.table.namespace, end)


def run_through(cache: KVCache, tokens: list[int]) -> int:
    """Compute a whole sequence and return the number of its cached tokens."""
    running = Running.open(cache, tokens)
    cached = running.num_computed
    assert running.compute(len(tokens), include_partial=True)
    running.check_content()
    running.close()
    cache.check()
    return cached


NAMESPACES = st.sampled_from([None, None, "a", "b"])
PIN_KEYS = st.sampled_from(["first", "second"])


class CacheMachine(RuleBasedStateMachine):
    """Random sequences over two tokens, so that shared prefixes, forks and duplicates are frequent."""

    dtype = torch.float32
    kind: type[Running] = Running

    @initialize()
    def start(self) -> None:
        self.cache = make_cache(dtype=self.dtype)
        self.running: list[Running] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT // 2), namespace=NAMESPACES)
    def open_new(self, tokens: list[int], namespace: str | None) -> None:
        if len(self.running) < ROWS:
            self.running.append(self.kind.open(self.cache, tokens, namespace))

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if 0 < len(self.running) < ROWS:
            parent = data.draw(st.sampled_from(self.running))
            cut = data.draw(st.integers(1, len(parent.tokens)))
            tokens = [*parent.tokens[:cut], data.draw(st.integers(0, 1))]
            self.running.append(self.kind.open(self.cache, tokens, parent.table.namespace))

    @rule(data=st.data(), count=st.integers(1, 9), include_partial=st.booleans())
    def compute(self, data: st.DataObject, count: int, include_partial: bool) -> None:
        if self.running:
            sequence = data.draw(st.sampled_from(self.running))
            if not sequence.compute(count, include_partial=include_partial):
                assert self.cache.num_available_pages == 0
                self.running.remove(sequence)
                sequence.close()

    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        if self.running:
            sequence = data.draw(st.sampled_from(self.running))
            if len(sequence.tokens) < CONTEXT:
                sequence.tokens.append(token)

    @rule(data=st.data(), pin_key=st.none() | PIN_KEYS)
    def close(self, data: st.DataObject, pin_key: str | None) -> None:
        if self.running:
            sequence = data.draw(st.sampled_from(self.running))
            self.running.remove(sequence)
            sequence.close(pin_key)

    @rule(pin_key=PIN_KEYS, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT // 2))
    def prune(self, pin_key: str, tokens: list[int]) -> None:
        self.cache.pins.prune(pin_key, tokens)

    @rule(pin_key=PIN_KEYS)
    def release(self, pin_key: str) -> None:
        self.cache.pins.release(pin_key)

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def consistent(self) -> None:
        self.cache.check()
        for sequence in self.running:
            sequence.check_content()
        if not self.running:
            assert self.cache.num_available_pages == PAGES


CacheMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None, derandomize=True)
TestRandomOperations = CacheMachine.TestCase


class NarrowCacheMachine(CacheMachine):
    """The same operations on an 8-bit cache, whose scales must move with the vectors."""

    dtype = torch.float8_e4m3fn


NarrowCacheMachine.TestCase.settings = CacheMachine.TestCase.settings
TestNarrowRandomOperations = NarrowCacheMachine.TestCase


def test_a_repeated_sequence_is_matched_up_to_its_last_token() -> None:
    for length in range(2, 4 * PAGE):
        cache = make_cache()
        tokens = list(range(length))
        assert run_through(cache, tokens) == 0
        assert run_through(cache, tokens) == length - 1
        assert run_through(cache, [*tokens, 99, 98]) == length


def test_namespaces_share_nothing_and_leave_nothing_behind() -> None:
    cache, tokens = make_cache(), list(range(10))
    for namespace in (None, "a", "b"):
        running = Running.open(cache, list(tokens), namespace)
        assert running.num_computed == 0
        assert running.compute(10)
        running.close()
        assert Running.open(cache, list(tokens), namespace).num_computed == 9
        cache.check()
    assert set(cache.tree.roots) == {None, "a", "b"}
    for table in list(cache._tables.values()):
        cache.close_table(table)
    cache.clear()
    assert cache.tree.roots == {}
    assert cache.pool.num_free == PAGES


def test_a_sequence_continues_after_its_namespaces_root_was_removed() -> None:
    cache = make_cache()
    run_through(cache, [1, 2, 3])
    running = Running.open(cache, [7, 7, 7, 7, 7])
    cache.clear()
    assert running.compute(5)
    run_through(cache, [1, 2, 3, 4, 5])
    running.close()
    cache.check()
    assert cache.match_prefix([7] * 5, 5).num_tokens == 5
    assert cache.match_prefix([1, 2, 3], 3).num_tokens == 3


def test_a_previous_match_is_updated() -> None:
    cache, tokens = make_cache(), list(range(20))
    previous_match = cache.match_prefix(tokens, 20)
    for length in (6, 11, 18):
        run_through(cache, tokens[:length])
        previous_match = cache.match_prefix(tokens, 20, None, previous_match)
        assert previous_match.num_tokens == length
        assert [node.page for node in previous_match.nodes] == [
            node.page for node in cache.match_prefix(tokens, 20).nodes
        ]
    run_through(cache, [99] * (CONTEXT - 8))
    assert (
        cache.match_prefix(tokens, 20, None, previous_match).num_tokens
        == cache.match_prefix(tokens, 20).num_tokens
        < 18
    )
    cache.clear()
    assert cache.match_prefix(tokens, 20, None, previous_match).num_tokens == 0


def test_a_match_made_before_a_change_of_the_tree_is_refused() -> None:
    cache = make_cache()
    match = cache.match_prefix([1, 2, 3], 3)
    run_through(cache, [1, 2, 3])
    with pytest.raises(RuntimeError, match="changed"):
        cache.open_table(match)


def test_branching_in_the_middle_of_a_page_copies_the_shared_part() -> None:
    cache = make_cache()
    run_through(cache, [1, 2, 3, 4, 5, 6, 7])
    assert run_through(cache, [1, 2, 3, 4, 5, 6, 9, 9]) == 6
    assert run_through(cache, [1, 2, 3, 9]) == 3
    assert run_through(cache, [9, 2, 3, 4]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
def test_tokens_are_moved_with_their_scales(dtype: torch.dtype) -> None:
    """Accepted draft tokens of two branches move to the slots after the committed tokens."""
    cache, tokens = make_cache(dtype=dtype), list(range(3 * PAGE))
    rows = [Running.open(cache, [first, *tokens[1:]]) for first in (0, 1)]
    for row in rows:
        assert row.compute(3 * PAGE)
    before = [read_marks(cache, row.table, 3 * PAGE) for row in rows]
    cache.move_tokens([(rows[0].table, 7, 5), (rows[0].table, 11, 6), (rows[1].table, 9, 4)])
    for marks_of, moves in zip(before, ([(7, 5), (11, 6)], [(9, 4)]), strict=True):
        held = list(marks_of)
        for start, end in moves:
            marks_of[end] = held[start]
    assert [read_marks(cache, row.table, 3 * PAGE) for row in rows] == before


def test_the_longest_of_several_partial_pages_is_chosen() -> None:
    cache = make_cache()
    for tail in ([5, 1], [5, 6, 1], [5, 6, 7]):
        run_through(cache, [1, 2, 3, 4, *tail])
    assert run_through(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 7


def test_a_partial_page_is_dropped_when_another_page_extends_it() -> None:
    """Sequences are random over two tokens, so many are neighbours in sorted order."""
    rng = random.Random(shift(4))
    tree = make_cache(pages=512).tree
    root, keys = tree.root(None), set[tuple[int, ...]]()
    for _ in range(400):
        key = tuple(rng.choices(range(2), k=rng.randint(1, PAGE)))
        if key in keys or tree.find_extension(root, key):
            continue
        page = tree.pool.allocate()
        assert page is not None
        tree.insert(root, key, page)
        tree.release([page])
        keys = {other for other in keys if key[: len(other)] != other} | {key}
        assert set(root.children) == keys
        tree.check()
    assert len(keys) > 1


@pytest.mark.parametrize("pin_key", [None, "search"])
@pytest.mark.parametrize("is_longer_first", [True, False])
def test_a_partial_page_in_use_is_dropped_when_it_is_released_after_another_page_extends_it(
    pin_key: str | None, is_longer_first: bool
) -> None:
    cache = make_cache(max_pinned=8)
    short, long = (Running.open(cache, [1, 2, 3, 4, *rest]) for rest in ([5], [5, 6, 7]))
    for running in (short, long):
        assert running.compute(7, include_partial=True)
    for running in (long, short) if is_longer_first else (short, long):
        running.close(pin_key)
        cache.check()
    assert [node.key for node in cache.tree.walk()] == [(1, 2, 3, 4), (5, 6, 7)]
    assert cache.pool.size - cache.pool.num_free == 2
    assert cache.tree.num_pinned == (0 if pin_key is None else 2)


def test_a_duplicate_page_is_freed_and_the_table_points_to_the_original() -> None:
    cache = make_cache()
    tokens = [1, 2, 3, 4, 5]
    first, second = Running.open(cache, list(tokens)), Running.open(cache, list(tokens))
    assert first.compute(5)
    assert second.compute(5)
    assert first.table.pages[0] == second.table.pages[0]
    assert cache.page_table[second.table.row, 0] == first.table.pages[0]
    assert cache.pool.size - cache.pool.num_free == 3
    second.check_content()
    cache.check()


def test_a_running_sequence_shares_its_prompt_while_it_grows() -> None:
    cache = make_cache()
    leader = Running.open(cache, [1, 2, 3, 4, 5, 6])
    assert leader.compute(6, include_partial=True)
    follower = Running.open(cache, [1, 2, 3, 4, 5, 6])
    assert follower.num_computed == 5
    leader.tokens.extend([7, 8, 9])
    assert leader.compute(3)
    follower.tokens.extend([0, 0, 0])
    assert follower.compute(9)
    leader.check_content()
    follower.check_content()
    cache.check()


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    cache = make_cache(pages=6)
    old, fresh = [1] * 8, [2] * 8
    run_through(cache, old)
    run_through(cache, fresh)
    run_through(cache, old)
    run_through(cache, [3] * 16)
    assert cache.match_prefix(old, 8).num_tokens > 0
    assert cache.match_prefix(fresh, 8).num_tokens == 0


def test_a_prompt_in_use_is_never_evicted() -> None:
    cache = make_cache(pages=4)
    reader = Running.open(cache, [1] * 8)
    assert reader.compute(8)
    other = Running.open(cache, [2] * 12)
    assert not other.compute(12)
    reader.check_content()
    other.close()
    reader.close()
    assert cache.num_available_pages == 4


def test_many_releases_without_eviction_do_not_grow_the_eviction_queue() -> None:
    cache = make_cache()
    for _ in range(1000):
        run_through(cache, [1, 2, 3, 4, 5])
    assert len(cache.tree._eviction_queue) < 100


def test_random_traffic_far_beyond_the_memory_loses_no_page() -> None:
    cache, chance = make_cache(), random.Random(shift(0))
    for _ in range(400):
        run_through(cache, [chance.randrange(3) for _ in range(chance.randrange(1, CONTEXT))])
    assert cache.num_available_pages == PAGES


def test_the_pool_refuses_to_reference_or_release_a_free_page() -> None:
    pool = PagePool(2)
    with pytest.raises(RuntimeError, match="free"):
        pool.incref([0])
    with pytest.raises(RuntimeError, match="free"):
        pool.decref([0])
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [0, 1, None]


def test_the_lowest_free_page_is_allocated_first() -> None:
    pool = PagePool(6)
    for _ in range(6):
        pool.allocate()
    pool.decref([4, 1, 5, 2])
    assert [pool.allocate(), pool.allocate()] == [1, 2]
    pool.decref([0])
    assert [pool.allocate(), pool.allocate(), pool.allocate(), pool.allocate()] == [0, 4, 5, None]
