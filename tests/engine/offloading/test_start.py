"""The folder of a lower tier: refused in one line if it cannot be used, private, and removed at the end."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from engine.device import CPU
from engine.offloading.costs import MIN_STEP_TOKENS, Costs
from engine.offloading.run_folder import GIB, RunFolder
from engine.offloading.setup import check_offloading
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError

OPTIONS = EngineOptions(cache_disk_gb=1 / 1024)


def refuse(options: EngineOptions) -> str:
    """Return why options are refused."""
    with pytest.raises(EngineError) as caught:
        check_offloading(options, CPU)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_with_room_is_created_and_left_empty(tmp_path: Path) -> None:
    check_offloading(replace(OPTIONS, cache_disk=str(tmp_path / "new" / "cache")), CPU)
    assert list((tmp_path / "new" / "cache").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "new" / "cache").stat().st_mode) == 0o700


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    assert "must be a folder" in (message := refuse(replace(OPTIONS, cache_disk=str(tmp_path / "file"))))
    assert "it is not a folder" in message


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_open(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("engine.offloading.run_folder.os.open", refuse_to_open)
    assert "Read-only file system" in refuse(replace(OPTIONS, cache_disk=str(tmp_path)))


def test_a_disk_that_is_full_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_write(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse_to_write)
    assert "No space left on device" in refuse(replace(OPTIONS, cache_disk=str(tmp_path)))


def test_more_than_the_disk_has_room_for_is_refused_with_what_is_free(tmp_path: Path) -> None:
    message = refuse(EngineOptions(cache_disk=str(tmp_path), cache_disk_gb=1e9))
    assert "GiB free" in message
    assert "choose fewer" in message


def test_a_size_without_a_folder_is_refused() -> None:
    assert "name that folder" in refuse(OPTIONS)


def test_host_memory_is_for_gpus() -> None:
    assert "cache_host_gb is for GPUs" in refuse(EngineOptions(cache_host_gb=1.0))


def test_files_are_their_users_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.path.with_suffix(".lock").stat().st_mode) == 0o600
    folder.remove()


def leave_folder(parent: Path) -> None:
    folder = RunFolder(parent)
    (folder.path / "0.kv").write_bytes(b"what was said")
    os._exit(9)


def test_what_a_killed_engine_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    living = RunFolder(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=leave_folder, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert len(list(tmp_path.glob("*/0.kv"))) == 1
    new = RunFolder(tmp_path)
    assert not list(tmp_path.glob("*/0.kv"))
    assert living.path.is_dir()
    for folder in (living, new):
        folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_is_loaded_while_that_takes_less_time_than_its_tokens() -> None:
    costs = Costs()
    assert costs.is_load_cheaper(100, disk_bytes=GIB, num_bytes=GIB)  # nothing is measured
    costs.add_step(100, 0.1)
    costs.add_read(1000, 0.01)
    assert costs.is_load_cheaper(100, disk_bytes=5000, num_bytes=5000)
    assert not costs.is_load_cheaper(100, disk_bytes=50_000, num_bytes=50_000)
    costs.add_copy(1000, 0.02)
    assert not costs.is_load_cheaper(100, disk_bytes=5000, num_bytes=5000)
    assert costs.is_load_cheaper(100, disk_bytes=0, num_bytes=4000)


def test_a_step_of_few_tokens_says_nothing_about_prompts() -> None:
    costs = Costs()
    costs.add_step(MIN_STEP_TOKENS - 1, 1e-9)
    costs.add_read(1, 1.0)
    assert costs.is_load_cheaper(1, disk_bytes=1000, num_bytes=1000)


def test_a_disk_that_was_slow_is_tried_again() -> None:
    costs = Costs()
    costs.add_step(100, 0.1)
    costs.add_read(1000, 1.0)
    answers = [costs.is_load_cheaper(100, disk_bytes=1000, num_bytes=1000) for _ in range(200)]
    assert not any(answers[:50])
    assert answers[-1]
