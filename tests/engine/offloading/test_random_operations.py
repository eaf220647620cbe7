"""Random operations on a cache with a lower tier: every invariant holds, and no mark or state is ever another's."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from engine.cache.states import SLOTS_PER_SEQUENCE
from engine.offloading import disk_store
from engine.offloading.loads import SequenceLoads
from engine.scheduler.scheduler import Schedule, Scheduler
from tests.engine.cache.test_cache import CONTEXT, NAMESPACES, PIN_KEYS, ROWS, CacheMachine, Running
from tests.engine.cache.test_states import Stateful, StatesMachine, make_cache
from tests.engine.core.test_random_operations import PAGES, Traffic, seen
from tests.engine.offloading.tiers import add_tier, list_files
from tests.engine.simulation import PAGE, Simulation
from tests.long import mostly_long

SMALL_GROUP = 600
PLACES = st.sampled_from([(6000, 0), (1 << 20, 0), (0, 1200), (3000, 600), (1 << 20, 600)])
"""Bytes on disk and in host memory."""


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "GROUP_BYTES", SMALL_GROUP)


def damage_file(folder: Path, number: int, kind: str) -> None:
    """Remove, cut, change or swap a file of records."""
    files = list_files(folder)
    if not files:
        return
    path = files[number % len(files)]
    content = path.read_bytes()
    if kind == "lost":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "changed":
        middle = number % len(content)
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.write_bytes(files[(number + 1) % len(files)].read_bytes())


class WaitingScheduler(Scheduler):
    """A scheduler that waits where an engine would sleep until a load is read."""

    def schedule(self) -> Schedule:
        schedule = super().schedule()
        while not schedule.scheduled and self.num_waiting and self.loader is not None:
            self.loader.wait()
            schedule = super().schedule()
        return schedule


class TieredTraffic(Traffic):
    """The clients of an engine whose cache has a lower tier."""

    @initialize(rows=st.integers(1, 6), step_tokens=st.integers(1, 40), max_pinned=st.integers(0, PAGES), places=PLACES)
    def start(self, rows: int, step_tokens: int, max_pinned: int, places: tuple[int, int]) -> None:  # type: ignore[override]
        self.folder = tempfile.TemporaryDirectory()
        self.engine = Simulation(
            pages=PAGES, rows=rows, step_tokens=step_tokens, max_pinned=max_pinned, pin_seconds=8.0, dtype=self.dtype
        )
        disk_bytes, host_bytes = places
        folder = Path(self.folder.name) if disk_bytes else None
        self.loader = add_tier(self.engine.cache, folder, disk_bytes=disk_bytes, host_bytes=host_bytes)
        self.engine.scheduler = WaitingScheduler(
            self.engine.cache, max_running=rows, step_tokens=step_tokens, loader=self.loader
        )
        self._submit([[token] * 20 for token in range(4)], 2 * PAGE, None, None, 0, float("inf"))

    @rule(number=st.integers(0, 10_000), kind=st.sampled_from(["lost", "cut", "changed", "swapped"]))
    def damage(self, number: int, kind: str) -> None:
        if number % 4 == 0 and self.loader.tier.disk is not None:
            self.loader.tier.disk.flush()
            damage_file(Path(self.folder.name), number, kind)

    @rule(number=st.integers(0, 9))
    def clear(self, number: int) -> None:  # type: ignore[override]
        if not number:
            super().clear()

    @precondition(lambda self: self.engine.ended)
    @rule(data=st.data(), more=st.integers(1, 12), pin_key=PIN_KEYS)
    def wake(self, data: st.DataObject, more: int, pin_key: str | None) -> None:
        """Go on with an old branch."""
        old = data.draw(st.sampled_from(self.engine.ended))
        self._submit([old.tokens[: PAGES * PAGE - 1]], more, old.namespace, pin_key, 0, float("inf"))
        self.engine.run()

    @rule()
    def write_everything(self) -> None:
        if self.loader.tier.disk is not None:
            self.loader.tier.disk.flush()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "loader"):
            stats = self.loader.tier.stats
            for name in ("pages_written", "pages_loaded", "pages_dropped"):
                seen[name] = seen.get(name, 0) + getattr(stats, name)
            self.loader.close()
            assert list(Path(self.folder.name).iterdir()) == []
            self.folder.cleanup()


class NarrowTieredTraffic(TieredTraffic):
    """The same operations with an 8-bit cache."""

    dtype = torch.int8


@pytest.mark.parametrize("traffic", mostly_long([TieredTraffic, NarrowTieredTraffic], every=2))
def test_random_operations_with_a_lower_tier_change_no_token(traffic: type[TieredTraffic]) -> None:
    seen.clear()
    machine = traffic.TestCase
    machine.settings = settings(
        max_examples=20,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    machine("runTest").runTest()
    assert all(seen[name] for name in ("pages_written", "pages_loaded", "pages_dropped")), seen


class _Restoring(Stateful):
    """A sequence with a state whose prefix comes back from a lower tier first."""

    @classmethod
    def open(cls, cache, tokens: list[int], namespace: str | None = None) -> _Restoring:  # type: ignore[no-untyped-def]
        loader = cache.loader
        own, limit = SequenceLoads(), len(tokens) - 1
        while loader.must_wait(own, cache.match_prefix(tokens, limit, namespace), namespace, tokens, limit):
            loader.wait()
            loader.poll()
            loader.restore(own, cache.match_prefix(tokens, limit, namespace), namespace)
        loader.restore(own, cache.match_prefix(tokens, limit, namespace), namespace)
        loader.forget(own)
        running = super().open(cache, tokens, namespace)
        assert isinstance(running, _Restoring)
        return running


class TieredStatesMachine(StatesMachine):
    """Operations on sequences with states over a cache with a lower tier."""

    kind: type[Running] = _Restoring

    @initialize(slots=st.integers(SLOTS_PER_SEQUENCE * ROWS, 3 * ROWS), distance=st.sampled_from([PAGE, 3 * PAGE]))
    def start(self, slots: int, distance: int) -> None:  # type: ignore[override]
        self.folder = tempfile.TemporaryDirectory()
        self.cache = make_cache(slots, distance)
        self.loader = self.cache.loader = add_tier(self.cache, Path(self.folder.name), disk_bytes=20_000)  # type: ignore[attr-defined]
        self.running = []

    @rule(number=st.integers(0, 9))
    def clear(self, number: int) -> None:  # type: ignore[override]
        if not number:
            super().clear()

    @rule()
    def lose_pins(self) -> None:
        self.cache.pins.evict_oldest_pins()

    @rule(data=st.data(), pin_key=PIN_KEYS, namespace=NAMESPACES)
    def park(self, data: st.DataObject, pin_key: str, namespace: str | None) -> None:
        """Compute a long sequence, which takes the memory of others."""
        if len(self.running) < ROWS:
            tokens = [data.draw(st.integers(0, 3))] * (CONTEXT // 2) + data.draw(
                st.lists(st.integers(0, 1), max_size=6)
            )
            sequence = self.kind.open(self.cache, tokens, namespace)
            sequence.compute(len(tokens), include_partial=True)
            sequence.close(pin_key)

    @rule(number=st.integers(0, 10_000), kind=st.sampled_from(["lost", "cut", "changed", "swapped"]))
    def damage(self, number: int, kind: str) -> None:
        if number % 4 == 0:
            assert self.loader.tier.disk is not None
            self.loader.tier.disk.flush()
            damage_file(Path(self.folder.name), number, kind)

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            for name in ("pages_written", "pages_loaded"):
                seen[name] = seen.get(name, 0) + getattr(self.loader.tier.stats, name)
            self.loader.close()
            self.folder.cleanup()


def test_random_operations_on_states_with_a_lower_tier_restore_the_state_of_their_tokens() -> None:
    seen.clear()
    machine = TieredStatesMachine.TestCase
    machine.settings = settings(
        CacheMachine.TestCase.settings,
        max_examples=40,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    machine("runTest").runTest()
    assert seen["pages_loaded"] > 0
