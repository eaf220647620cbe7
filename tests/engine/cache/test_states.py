"""States beside pages: under random operations every sequence goes on from the state after exactly its own tokens.

A state here is the mark of the last token (``tests.engine.simulation``), which depends on the namespace and on every
token before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from engine.attention.layer import HeadShape
from engine.cache.paged_kv import KVCache
from engine.cache.state_layers import NO_STATE, StateLayer, StateStep
from engine.cache.states import SLOTS_PER_SEQUENCE, StatePool, StateRow
from tests.engine.cache.test_cache import CONTEXT, PAGES, ROWS, CacheMachine, Running
from tests.engine.simulation import PAGE, marks, write_marks


def make_cache(slots: int = 2 * SLOTS_PER_SEQUENCE * ROWS, distance: int = 2 * PAGE) -> KVCache:
    return KVCache(
        layers=[HeadShape(1, 1, 1)],
        pages=PAGES,
        page_size=PAGE,
        rows=ROWS,
        context=CONTEXT,
        max_pinned=PAGES // 2,
        states=StatePool([StateLayer(((1,),))], slots, snapshot_distance=distance),
    )


def pool_of(cache: KVCache) -> StatePool:
    assert cache.states is not None
    return cache.states


def follow(namespace: str | None, start: int | None, tokens: list[int]) -> int:
    """Return the state after some tokens that follow a state."""
    mark = sum(map(ord, namespace or "")) if start is None else start
    for token in tokens:
        mark = (mark * 31 + token + 7) % 1_000_003
    return mark


def run_segments(step: StateStep, namespaces: list[str | None], tokens: list[list[int]]) -> None:
    """Compute a step's states, given the namespace and the tokens of each row, drafts included."""
    [[tensor]] = step.layers
    flat = [(namespace, token) for namespace, row in zip(namespaces, tokens, strict=True) for token in row]
    for segment in step.segments:
        part = flat[segment.start : segment.end]
        start = None if segment.source == NO_STATE else int(tensor[segment.source])
        tensor[segment.target] = follow(part[0][0], start, [token for _, token in part])


@dataclass
class Stateful(Running):
    """A running sequence with a state."""

    @classmethod
    def open(cls, cache: KVCache, tokens: list[int], namespace: str | None = None) -> Stateful:
        match = cache.match_prefix(tokens, len(tokens) - 1, namespace)
        table = cache.open_table(match, namespace, wanted=(len(tokens) - 1,))
        running = cls(cache, tokens, table, table.num_cached_tokens)
        running.check_content()
        return running

    def compute(self, count: int, *, include_partial: bool = False) -> bool:
        count = min(count, len(self.tokens) - self.num_computed)
        if not self.cache.reserve(self.table, self.num_computed + count):
            return False
        if count:
            self.compute_with_drafts(count, [], [], 0, include_partial=include_partial)
        return True

    def compute_with_drafts(
        self, count: int, drafts: list[int], parents: list[int], num_accepted: int, *, include_partial: bool = False
    ) -> None:
        """Compute tokens and drafts in one step, of which the first path of ``num_accepted`` drafts is accepted."""
        pool, state = pool_of(self.cache), self.table.state
        assert state is not None
        new = self.tokens[self.num_computed : self.num_computed + count]
        run_segments(pool.plan([StateRow(state, count, parents)]), [self.table.namespace], [[*new, *drafts]])
        [work] = pool.commit()
        self.advance(count, include_partial=include_partial)
        if work.snapshots:
            self.cache.keep_snapshots(self.table, self.tokens, work.snapshots)
        if pool.wants_snapshot(state):
            self.cache.keep_state(self.table, self.tokens)
        path = [parents.index(-1)] if num_accepted and parents else []
        while path and len(path) < num_accepted and path[-1] in parents:
            path.append(parents.index(path[-1]))
        self.tokens += [drafts[index] for index in path]
        self.advance(len(path))
        pool.accept(work, path)
        pool.release_drafts(work)

    def advance(self, count: int, *, include_partial: bool = False) -> None:
        write_marks(self.cache, self.table, self.tokens, self.num_computed, self.num_computed + count)
        self.num_computed += count
        self.cache.publish(self.table, self.tokens, self.num_computed, include_partial=include_partial)

    def check_content(self) -> None:
        super().check_content()
        state = self.table.state
        assert state is not None
        assert state.num_tokens == self.num_computed
        if self.num_computed:
            [[tensor]] = pool_of(self.cache).layers
            assert int(tensor[state.slot]) == marks(self.table.namespace, self.tokens[: self.num_computed])[-1]

    def close(self, pin_key: str | None = None) -> None:
        end = self.cache.publish(self.table, self.tokens, self.num_computed, include_partial=True)
        self.cache.keep_state(self.table, self.tokens)
        self.cache.close_table(self.table)
        if pin_key is not None and end is not None:
            self.cache.pins.pin(pin_key, self.table.namespace, end)


class StatesMachine(CacheMachine):
    """The operations of ``CacheMachine`` on sequences with states, and the verification of drafts."""

    kind = Stateful

    @initialize(slots=st.integers(SLOTS_PER_SEQUENCE * ROWS, 4 * ROWS), distance=st.sampled_from([PAGE, 3 * PAGE]))
    def start(self, slots: int, distance: int) -> None:  # type: ignore[override]
        self.cache = make_cache(slots, distance)
        self.running = []

    @rule(data=st.data(), drafts=st.lists(st.integers(0, 1), min_size=1, max_size=4), accepted=st.integers(0, 4))
    def verify(self, data: st.DataObject, drafts: list[int], accepted: int) -> None:
        """Verify a tree of drafts after the last token."""
        behind = [one for one in self.running if isinstance(one, Stateful) and one.num_computed < len(one.tokens)]
        if not behind:
            return
        sequence = data.draw(st.sampled_from(behind))
        count, end = len(sequence.tokens) - sequence.num_computed, len(sequence.tokens) + len(drafts)
        state = sequence.table.state
        assert state is not None
        fits = end < CONTEXT and self.cache.reserve(sequence.table, end)
        if not fits or pool_of(self.cache).count_spare_slots([state]) < len(drafts):
            return
        parents = [data.draw(st.integers(-1, index - 1)) for index in range(len(drafts))]
        sequence.compute_with_drafts(count, drafts, parents, accepted)


StatesMachine.TestCase.settings = CacheMachine.TestCase.settings
TestRandomOperations = StatesMachine.TestCase


def compute_and_close(cache: KVCache, tokens: list[int]) -> int:
    """Compute a whole sequence; return the number of its cached tokens."""
    running = Stateful.open(cache, tokens)
    cached = running.num_computed
    assert running.compute(len(tokens), include_partial=True)
    running.close()
    cache.check()
    return cached


def test_a_sibling_goes_on_before_the_last_token_of_a_prompt() -> None:
    cache = make_cache()
    prompt = [1, 0, 1, 1, 0, 1]
    assert compute_and_close(cache, prompt) == 0
    assert compute_and_close(cache, prompt) == len(prompt) - 1


def test_a_child_goes_on_at_the_end_of_its_parent() -> None:
    cache = make_cache()
    parent = [1, 0, 1, 1, 0, 1]
    compute_and_close(cache, parent)
    assert compute_and_close(cache, [*parent, 0, 0]) == len(parent)


def test_a_prefix_that_is_computed_twice_has_a_snapshot_for_the_third() -> None:
    """The common beginning of two prompts ends where no snapshot was wanted when the first one was computed."""
    cache = make_cache(distance=CONTEXT)
    common = [1, 0, 1, 1, 0, 1, 0, 0]
    assert compute_and_close(cache, [*common, 0, 0, 0]) == 0
    assert compute_and_close(cache, [*common, 1, 1, 1]) == 0
    assert compute_and_close(cache, [*common, 1, 0, 1]) == len(common)


def test_snapshots_lie_at_regular_distances_along_a_sequence() -> None:
    cache = make_cache(distance=2 * PAGE)
    tokens = [index % 2 for index in range(5 * PAGE + 1)]
    compute_and_close(cache, tokens)
    assert compute_and_close(cache, [*tokens[: 4 * PAGE + 1], 1, 1]) == 4 * PAGE + 1 - 1


def test_a_dropped_snapshot_costs_time_but_no_correctness() -> None:
    """With room for the states of running sequences alone each prompt drops the snapshots of those before it."""
    cache = make_cache(slots=SLOTS_PER_SEQUENCE)
    first, second = [1, 0, 1, 1, 0, 1], [0, 1, 1, 0]
    compute_and_close(cache, first)
    compute_and_close(cache, second)
    assert compute_and_close(cache, first) < len(first) - 1
    assert pool_of(cache).num_snapshots <= SLOTS_PER_SEQUENCE


def test_check_finds_a_slot_that_nobody_references() -> None:
    cache = make_cache()
    pool_of(cache).slots.allocate()
    with pytest.raises(RuntimeError, match="reference counts"):
        cache.check()


def test_check_finds_a_snapshot_outside_of_its_page() -> None:
    cache = make_cache()
    compute_and_close(cache, [1, 0, 1])
    [node] = [node for node in cache.tree.walk() if node.snapshots]
    node.snapshots[PAGE + 1] = node.snapshots.pop(max(node.snapshots))
    with pytest.raises(RuntimeError, match="outside of its page"):
        cache.check()


def test_a_damaged_snapshot_is_found_by_its_page() -> None:
    cache = make_cache()
    compute_and_close(cache, [1, 0, 1])
    [[tensor]] = pool_of(cache).layers
    [node] = [node for node in cache.tree.walk() if node.snapshots]
    tensor[max(node.snapshots.values())] = torch.nan
    assert cache.find_damaged([]) == {node.page}
    cache.drop([node.page])
    assert pool_of(cache).num_snapshots == 0
    cache.check()


@pytest.mark.parametrize("is_last", [True, False])
def test_the_state_before_a_token_that_is_not_read_yet_is_kept(*, is_last: bool) -> None:
    """Two sequences take turns, with no slots besides theirs. Their last token ends them or does not."""
    cache = make_cache(slots=2 * SLOTS_PER_SEQUENCE, distance=CONTEXT)
    pool, prompts = pool_of(cache), ([1, 0, 1], [0, 0, 1])
    running = [Stateful.open(cache, [*prompt, 1, 0, 1, 0]) for prompt in prompts]
    for one in running:
        assert one.compute(3)
    [[tensor]] = pool.layers
    while running[0].num_computed < len(running[0].tokens):
        rows = []
        for one in running:
            assert one.table.state is not None
            pool.release_previous(one.table.state)  # the token before was read
            assert cache.reserve(one.table, one.num_computed + 1)
            rows.append(StateRow(one.table.state, 1, is_token_unread=True))
        tokens = [one.tokens[one.num_computed : one.num_computed + 1] for one in running]
        run_segments(pool.plan(rows), [None, None], tokens)
        pool.commit()
        for one, row in zip(running, rows, strict=True):
            one.advance(1)
            one.check_content()
            assert int(tensor[row.state.previous]) == marks(None, one.tokens[: one.num_computed - 1])[-1]
        cache.check()
    for one in running:
        count = one.num_computed - is_last
        cache.publish(one.table, one.tokens, count, include_partial=True)
        cache.keep_last_state(one.table, one.tokens, count)
        cache.close_table(one.table)
        cache.check()
        assert cache.match_prefix([*one.tokens, 1], len(one.tokens)).num_tokens == count
