"""Loads of evicted prefixes at the level of the scheduler: what waits, what is shared, and what is given up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine.offloading import loads, record_file
from engine.offloading.loads import LOAD_SECONDS, Loader, SequenceLoads
from engine.scheduler.scheduler import Scheduler
from tests.engine.offloading.test_random_operations import WaitingScheduler
from tests.engine.offloading.tiers import add_tier, flush, list_files
from tests.engine.simulation import PAGE, Simulation


class Small(Simulation):
    """A simulation with twelve pages, all of which may be pinned for ten seconds, and a lower tier on disk."""

    loader: Loader

    def __init__(self, folder: Path, **sizes: int) -> None:
        super().__init__(pages=12, step_tokens=64, max_pinned=12, pin_seconds=10.0)
        self.loader = add_tier(self.cache, folder, **sizes)
        self.loader._clock = lambda: self.now
        self.scheduler = WaitingScheduler(self.cache, max_running=8, step_tokens=64, loader=self.loader)

    def compute(self, tokens: list[int], pin_key: str | None = None) -> int:
        """Run a sequence to its end; return the number of tokens that were computed."""
        before = self.computed
        self.add([tokens], len(tokens), pin_key=pin_key)
        self.run()
        return self.computed - before

    def fill(self) -> None:
        """Evict everything."""
        self.compute([7000 + index for index in range(12 * PAGE)])


def path(start: int, pages: int = 3) -> list[int]:
    return list(range(start, start + pages * PAGE))


@pytest.fixture
def small(tmp_path: Path) -> Any:
    simulation = Small(tmp_path)
    yield simulation
    simulation.loader.close()


def test_pages_without_a_claim_are_not_kept(small: Small, tmp_path: Path) -> None:
    small.compute(path(0))
    small.fill()
    flush(small.loader)
    assert not list_files(tmp_path)
    assert small.compute(path(0)) == 3 * PAGE


def test_pages_that_lost_their_pin_come_back(small: Small) -> None:
    small.compute(path(0), "search")
    small.fill()
    flush(small.loader)
    assert small.compute(path(0), "search") == 1
    assert small.loader.tier.stats.tokens_loaded == 3 * PAGE - 1


def test_pages_whose_pin_expired_come_back(small: Small) -> None:
    small.compute(path(0), "search")
    small.now = 11.0
    small.cache.pins.expire()
    assert not len(small.cache.pins)
    small.fill()
    assert small.compute(path(0)) == 1


def test_pages_of_a_released_key_are_not_kept(small: Small) -> None:
    small.compute(path(0), "search")
    small.cache.pins.evict_oldest_pins()
    small.cache.pins.release("search")
    small.fill()
    assert not len(small.loader.tier.index)


def test_a_page_that_two_keys_claim_is_kept_until_both_are_released(small: Small) -> None:
    small.compute(path(0), "one")
    small.compute(path(0), "two")
    small.fill()
    small.cache.pins.release("one")
    assert len(small.loader.tier.index) == 3
    small.cache.pins.release("two")
    assert not len(small.loader.tier.index)


def test_a_pruned_branch_is_forgotten_back_to_where_another_leaves_it(small: Small) -> None:
    trunk = path(0, pages=2)
    small.compute([*trunk, *path(100, pages=2)], "search")
    small.compute([*trunk, *path(200, pages=2)], "search")
    small.fill()
    assert len(small.loader.tier.index) == 6
    small.cache.pins.prune("search", [*trunk, *path(100, pages=2)])
    assert len(small.loader.tier.index) == 4
    assert small.compute([*trunk, *path(200, pages=2)]) == 1


def test_branches_with_the_same_prefix_share_one_load(small: Small) -> None:
    small.compute(path(0), "search")
    small.fill()
    flush(small.loader)
    before = small.computed
    small.add([[*path(0), 50 + index] for index in range(4)], 3 * PAGE + 1)
    small.run()
    assert small.computed - before == 4
    assert small.loader.tier.stats.pages_loaded == 3


def test_a_long_prefix_comes_in_several_loads(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_LOADED_BYTES", 2 * small.loader.tier.page_bytes.num_bytes)
    small.compute(path(0, pages=7), "search")
    small.fill()
    flush(small.loader)
    assert small.compute(path(0, pages=7)) == 1


def test_the_oldest_pages_leave_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.offloading.disk_store.GROUP_BYTES", 1)
    small = Small(tmp_path, disk_bytes=2200)
    for start in (0, 100, 200):
        small.compute(path(start, pages=6), f"search {start}")
    small.fill()
    flush(small.loader)
    small.check()
    assert sum(file.stat().st_size for file in list_files(tmp_path)) <= 2200
    assert small.loader.tier.stats.pages_dropped > 0
    assert small.compute(path(200, pages=6)) < small.compute(path(0, pages=6))
    small.loader.close()


def test_a_load_that_takes_too_long_is_computed_instead(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    small.compute(path(0), "search")
    small.fill()
    flush(small.loader)
    read, may_read = record_file.read_records, threading.Event()

    def read_later(*arguments: Any) -> Any:
        assert may_read.wait(60)
        return read(*arguments)

    monkeypatch.setattr(loads, "read_records", read_later)
    small.scheduler = Scheduler(small.cache, max_running=8, step_tokens=64, loader=small.loader)
    small.add([path(0)], 3 * PAGE)
    assert not small.scheduler.schedule().scheduled
    small.now = LOAD_SECONDS + 1.0
    before = small.computed
    small.run()
    assert small.computed - before == 3 * PAGE
    may_read.set()


def test_a_cancelled_sequence_leaves_no_load(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    small.compute(path(0), "search")
    small.fill()
    flush(small.loader)
    small.scheduler = Scheduler(small.cache, max_running=8, step_tokens=64, loader=small.loader)
    request = small.add([path(0)], 3 * PAGE)
    assert not small.scheduler.schedule().scheduled
    small.cancel(request)
    small.check()
    assert small.loader.next_deadline == float("inf")


def test_damaged_pages_do_not_come_back(small: Small) -> None:
    small.compute(path(0), "search")
    small.fill()
    small.cache.drop([])
    assert not len(small.loader.tier.index)
    assert small.compute(path(0)) == 3 * PAGE


def test_check_finds_a_record_that_is_nowhere(small: Small) -> None:
    small.compute(path(0), "search")
    small.fill()
    record = next(iter(small.loader.tier.index))
    record.group = None
    with pytest.raises(RuntimeError):
        small.cache.check()
    small.loader.tier.index.remove(record)


def test_a_page_that_is_lost_between_others_ends_what_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.offloading.disk_store.GROUP_BYTES", 1)
    small = Small(tmp_path)
    tokens = path(0, pages=4)
    small.compute(tokens, "search")
    small.fill()
    flush(small.loader)
    list_files(tmp_path)[2].unlink()  # pages are evicted from the end: this is the second one
    assert small.compute(tokens) == 3 * PAGE
    small.loader.close()


def test_pages_that_were_computed_meanwhile_are_not_restored_behind_themselves(small: Small) -> None:
    tokens = path(0, pages=4)
    small.compute(tokens, "search")
    small.fill()
    flush(small.loader)
    loader, own = small.loader, SequenceLoads()
    match = small.cache.match_prefix(tokens, len(tokens))
    assert loader.must_wait(own, match, None, tokens, len(tokens))
    loader.wait()
    small.scheduler = Scheduler(small.cache, max_running=8, step_tokens=64)
    small.compute(tokens[: 2 * PAGE])
    loader.poll()
    assert loader.restore(own, small.cache.match_prefix(tokens, len(tokens)), None)
    small.check()
    assert small.loader.tier.stats.pages_loaded == 2
    assert small.compute(tokens) == 1


def test_pages_that_left_while_a_sequence_waited_for_room_are_loaded_with_the_others(small: Small) -> None:
    tokens = path(0, pages=4)
    small.compute(tokens, "search")
    small.cache.pins.evict_oldest_pins()
    for _ in range(2):
        small.cache.tree.evict()
    loader, own = small.loader, SequenceLoads()
    assert not loader.must_wait(own, small.cache.match_prefix(tokens, len(tokens)), None, tokens, len(tokens))
    with_loads, small.scheduler = small.scheduler, Scheduler(small.cache, max_running=8, step_tokens=64)
    small.fill()
    small.scheduler = with_loads
    flush(loader)
    assert loader.restore(own, small.cache.match_prefix(tokens, len(tokens)), None)
    assert small.loader.tier.stats.pages_loaded == 0
    assert small.compute(tokens) == 1
