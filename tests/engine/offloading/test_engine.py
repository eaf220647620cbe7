"""Searches larger than memory: what an engine evicts comes back from disk or host memory with its bits."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core import model_setup
from engine.core.engine_core import EngineCore
from engine.core.local_engine import LocalEngine
from engine.offloading import disk_store, loads, record_file
from engine.offloading.costs import Costs
from engine.offloading.loads import Loader
from engine.offloading.run_folder import GIB
from engine.offloading.stats import OffloadingStats
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion
from tests.engine.conftest import Checkpoints
from tests.engine.gpu import emulate_gpu
from tests.engine.helpers import Harness, generate, qwen3_for
from tests.engine.offloading.tiers import list_files
from tests.long import mostly_long, mostly_long_grid

SEARCHES, PROMPT, FIRST, SECOND = 12, 40, 9, 6
LARGE = EngineOptions(kv_tokens=4096, state_slots=400, max_running=8, step_tokens=64, page_size=8, deterministic=True)
SMALL = replace(LARGE, kv_tokens=160)
"""Room for three of the searches."""


def create_prompt(search: int) -> tuple[int, ...]:
    return tuple(1 + (search * 37 + 5 * index) % 250 for index in range(PROMPT))


def get_stats(harness: Harness) -> OffloadingStats:
    stats = harness.core.stats.offloading
    assert stats is not None
    return stats


def get_loader(harness: Harness) -> Loader:
    loader = harness.core.runner.loader
    assert loader is not None
    return loader


def flush(harness: Harness) -> None:
    """Wait until everything that was evicted is on disk."""
    loader = get_loader(harness)
    if loader.tier.disk is not None:
        loader.tier.disk.flush()


@contextmanager
def closing(harness: Harness) -> Iterator[Harness]:
    try:
        yield harness
    finally:
        harness.core.close()


def park(harness: Harness) -> list[Completion]:
    """Run the first part of every search, which then waits for something."""
    return [
        harness.complete(
            generate(create_prompt(search), [Branch(search, 0, FIRST)], pin_key=f"search {search}", ignore_eos=True)
        )[0]
        for search in range(SEARCHES)
    ]


def wake_all(harness: Harness, parked: list[Completion], salt: str | None = None) -> list[Completion]:
    """Go on with every search."""
    return [
        harness.complete(
            generate(
                (*create_prompt(search), *map(int, one.token_ids)),
                [Branch(search, 1, SECOND)],
                pin_key=f"search {search}",
                cache_salt=salt,
                ignore_eos=True,
            )
        )[0]
        for search, one in enumerate(parked)
    ]


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [(one.token_ids, one.logprob) for one in ours] == [(one.token_ids, one.logprob) for one in theirs]


@pytest.fixture(autouse=True)
def _loading_is_always_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load whatever is there, although these models compute a page faster than a disk reads one."""
    monkeypatch.setattr(Costs, "is_load_cheaper", lambda *_, **__: True)


@pytest.mark.parametrize("kv_dtype", mostly_long(["int8", "auto", "fp8", "int4"], every=3))
def test_parked_searches_wake_with_the_same_bits_and_hardly_compute(
    checkpoints: Checkpoints, tmp_path: Path, kv_dtype: str
) -> None:
    folder = checkpoints(qwen3_for(kv_dtype))
    large = Harness(folder, replace(LARGE, kv_dtype=kv_dtype))
    parked = park(large)
    expected = wake_all(large, parked)
    with closing(Harness(folder, replace(SMALL, kv_dtype=kv_dtype, cache_disk=str(tmp_path)))) as small:
        assert_same(park(small), parked)
        flush(small)
        ours = wake_all(small, parked)
        assert_same(ours, expected)
        # The token that was sampled last was never computed.
        assert [one.cached_tokens for one in ours] == [PROMPT + FIRST - 1] * SEARCHES
        stats = get_stats(small)
        assert stats.pages_loaded >= (SEARCHES - 3) * PROMPT // 8
        assert not stats.pages_lost
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", mostly_long(["qwen3_5", "lfm2", "gemma4", "deepseek_v3", "mamba2"], every=3))
def test_states_latents_and_shared_layers_come_back(checkpoints: Checkpoints, tmp_path: Path, kind: str) -> None:
    folder = checkpoints(kind)
    large = Harness(folder, LARGE)
    parked = park(large)
    expected = wake_all(large, parked)
    with closing(Harness(folder, replace(SMALL, state_slots=6, cache_disk=str(tmp_path)))) as small:
        assert_same(park(small), parked)
        flush(small)
        ours = wake_all(small, parked)
        assert_same(ours, expected)
        assert [one.cached_tokens for one in ours] == [one.cached_tokens for one in expected]


@pytest.mark.parametrize(("has_disk", "is_emulated"), mostly_long_grid([True, False], [False, True], every=3))
def test_host_memory_takes_what_a_gpu_evicts_and_gives_the_rest_to_the_disk(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_disk: bool, is_emulated: bool
) -> None:
    """Tensors of the CPU pose as a GPU's memory."""
    folder = checkpoints("qwen3")
    if is_emulated:
        emulate_gpu(monkeypatch)
    monkeypatch.setattr(model_setup, "check_offloading", lambda *_: None)
    large = Harness(folder, LARGE)
    parked = park(large)
    expected = wake_all(large, parked)
    page = large.core.runner.cache.page_size * large.core.runner._bytes_per_token
    room = 2 * SEARCHES if has_disk else SEARCHES * (PROMPT + FIRST + 8) // 8
    options = replace(SMALL, cache_host_gb=page * room / GIB, cache_disk=str(tmp_path) if has_disk else None)
    with closing(Harness(folder, options)) as small:
        assert_same(park(small), parked)
        flush(small)
        small.core.stats  # noqa: B018
        ours = wake_all(small, parked)
        assert_same(ours, expected)
        assert [one.cached_tokens for one in ours] == [PROMPT + FIRST - 1] * SEARCHES
        assert 0 < get_stats(small).host_bytes <= page * room
        assert (get_stats(small).disk_bytes > 0) == has_disk


@pytest.mark.parametrize("kind", ["lost", "cut", "changed", "swapped", "of another engine"])
def test_a_damaged_file_costs_a_recomputation_and_nothing_else(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = checkpoints("qwen3")
    monkeypatch.setattr(disk_store, "GROUP_BYTES", 1)
    large = Harness(folder, LARGE)
    parked = park(large)
    expected = wake_all(large, parked)
    with (
        closing(Harness(folder, replace(SMALL, cache_disk=str(tmp_path / "ours")))) as small,
        closing(Harness(folder, replace(SMALL, cache_disk=str(tmp_path / "other")))) as other,
    ):
        for one in (small, other):
            park(one)
            flush(one)
        files, others = list_files(tmp_path / "ours"), list_files(tmp_path / "other")
        for index, path in enumerate(files):
            content = path.read_bytes()
            if kind == "lost":
                path.unlink()
            elif kind == "cut":
                path.write_bytes(content[:-1])
            elif kind == "changed":
                middle = index * 7 % len(content)
                path.write_bytes(content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :])
            elif kind == "of another engine":
                path.write_bytes(others[index].read_bytes())
        if kind == "swapped":
            contents = [path.read_bytes() for path in files]
            for path, content in zip(files, contents[1:] + contents[:1], strict=True):
                path.write_bytes(content)
        ours = wake_all(small, parked)
        assert_same(ours, expected)
        assert get_stats(small).pages_lost > 0
        assert min(one.cached_tokens for one in ours) == 0


def test_a_disk_that_fills_up_is_written_to_no_more_and_searches_go_on(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoints("qwen3")
    large = Harness(folder, LARGE)
    parked = park(large)
    expected = wake_all(large, parked)
    write, files = record_file.write_records, []

    def write_some(path: Path, *rest: Any) -> None:
        files.append(path)
        if len(files) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *rest)

    monkeypatch.setattr(disk_store, "write_records", write_some)
    monkeypatch.setattr(disk_store, "GROUP_BYTES", 1)
    with closing(Harness(folder, replace(SMALL, cache_disk=str(tmp_path)))) as small:
        assert_same(park(small), parked)
        flush(small)
        assert_same(wake_all(small, parked), expected)
        stats = get_stats(small)
        assert stats.write_failures > 0
        assert stats.pages_dropped > 0
        lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(lines) == 1
        assert "No space left on device" in lines[0]


def test_a_preempted_branch_gets_its_pages_back(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints("qwen3")
    requests = [generate(create_prompt(search), [Branch(search, 0, 60)], ignore_eos=True) for search in range(6)]
    large = Harness(folder, LARGE)
    expected = [large.complete(request)[0] for request in requests]
    with closing(Harness(folder, replace(SMALL, kv_tokens=240, cache_disk=str(tmp_path)))) as small:
        events = [small.submit(request) for request in requests]
        small.run()
        assert small.core.stats.preemptions > 0
        assert get_stats(small).tokens_loaded > 0
        ours = [event for some in events for event in some if isinstance(event, Completion)]
        assert [one.token_ids for one in ours] == [one.token_ids for one in expected]
        assert not len(get_loader(small).tier.index)


def test_a_released_search_leaves_no_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with closing(Harness(checkpoints("qwen3"), replace(SMALL, cache_disk=str(tmp_path)))) as small:
        park(small)
        flush(small)
        assert list_files(tmp_path)
        for search in range(SEARCHES):
            small.core.release(f"search {search}")
        assert not len(get_loader(small).tier.index)
        assert not list_files(tmp_path)
        small.core.check_invariants()


def test_another_namespace_finds_nothing(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with closing(Harness(checkpoints("qwen3"), replace(SMALL, cache_disk=str(tmp_path)))) as small:
        parked = park(small)
        flush(small)
        assert {one.cached_tokens for one in wake_all(small, parked, salt="another tenant")} == {0}
        assert not get_stats(small).pages_loaded


def test_clearing_the_cache_empties_the_lower_tier(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with closing(Harness(checkpoints("qwen3"), replace(SMALL, cache_disk=str(tmp_path)))) as small:
        parked = park(small)
        flush(small)
        small.core.clear_cache()
        assert not list_files(tmp_path)
        assert {one.cached_tokens for one in wake_all(small, parked)} == {0}


def test_a_step_that_fails_leaves_the_lower_tier_as_it_is(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("qwen3")
    large = Harness(folder, LARGE)
    parked = park(large)
    expected = wake_all(large, parked)
    with closing(Harness(folder, replace(SMALL, cache_disk=str(tmp_path)))) as small:
        park(small)
        flush(small)
        schedule, calls = small.core._scheduler.schedule, []

        def fail_once() -> Any:
            calls.append(None)
            if len(calls) == 3:
                raise RuntimeError("planted")
            return schedule()

        monkeypatch.setattr(small.core._scheduler, "schedule", fail_once)
        assert_same(wake_all(small, parked), expected)
        assert len(calls) > 3
        assert get_stats(small).pages_loaded > 0


def test_only_the_request_whose_prefix_is_read_waits(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("qwen3")
    large = Harness(folder, LARGE)
    parked = park(large)
    [expected, *_] = wake_all(large, parked)
    read, may_read = record_file.read_records, threading.Event()

    def read_later(*arguments: Any) -> Any:
        assert may_read.wait(60)
        return read(*arguments)

    monkeypatch.setattr(loads, "read_records", read_later)
    with closing(Harness(folder, replace(SMALL, cache_disk=str(tmp_path)))) as small:
        park(small)
        flush(small)
        prompt = (*create_prompt(0), *map(int, parked[0].token_ids))
        waiting = small.submit(generate(prompt, [Branch(0, 1, SECOND)], pin_key="search 0", ignore_eos=True))
        other = small.submit(generate((7, 8, 9), [Branch(1, 1, 5)], request_id="other", ignore_eos=True))
        while not other:
            small.core.step()
        small.core.step()
        assert not waiting
        assert small.core.waits_for_loads
        may_read.set()
        small.run()
        [completion] = waiting
        assert isinstance(completion, Completion)
        assert_same([completion], [expected])
        assert completion.cached_tokens == len(prompt) - 1


async def test_the_engines_thread_sleeps_until_a_prefix_is_read(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("qwen3")
    read, may_read, is_asleep = record_file.read_records, threading.Event(), threading.Event()

    def read_later(*arguments: Any) -> Any:
        assert may_read.wait(60)
        return read(*arguments)

    engine = LocalEngine({"m": folder}, replace(SMALL, cache_disk=str(tmp_path)))
    try:
        parked = [await complete(engine, search, create_prompt(search), FIRST) for search in range(SEARCHES)]
        core, sleep = engine._cores["m"], engine._wake.wait

        def note_sleep(timeout: float | None = None) -> bool:
            if core.has_work:
                is_asleep.set()
            return sleep(timeout)

        monkeypatch.setattr(engine._wake, "wait", note_sleep)
        monkeypatch.setattr(loads, "read_records", read_later)
        wake = asyncio.ensure_future(complete(engine, 0, (*create_prompt(0), *parked[0]), SECOND))
        assert await asyncio.to_thread(is_asleep.wait, 60)
        launches = count_calls(monkeypatch, core)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not launches
        may_read.set()
        ours = await wake
    finally:
        may_read.set()
        await engine.close()
    large = Harness(folder, LARGE)
    [expected, *_] = wake_all(large, park(large))
    assert ours == tuple(map(int, expected.token_ids))


def count_calls(monkeypatch: pytest.MonkeyPatch, core: EngineCore) -> list[None]:
    """Return a list that grows with each launch of a core."""
    launch, calls = core.launch, list[None]()

    def count() -> None:
        calls.append(None)
        launch()

    monkeypatch.setattr(core, "launch", count)
    return calls


async def complete(engine: LocalEngine, search: int, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the tokens of the first or the second part of a search."""
    branch = Branch(search, int(count == SECOND), count)
    request = generate(prompt, [branch], request_id=f"{search}", pin_key=f"search {search}", ignore_eos=True)
    [completion] = [event async for event in engine.generate(request) if isinstance(event, Completion)]
    return tuple(map(int, completion.token_ids))
