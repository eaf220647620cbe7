"""The number of threads follows the CPU affinity and the quota of the control group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.threads.processors import Processors, choose_threads, find_processors
from engine.threads.short_waits import SPIN_COUNT, shorten_waits


def _proc(folder: Path, groups: str, *mounts: str) -> Path:
    """Create a process's folder with its groups and controller mounts, each ``ROOT MOUNTPOINT KIND OPTIONS``."""
    folder.mkdir(exist_ok=True)
    (folder / "cgroup").write_text(groups)
    lines = ["22 1 8:1 / / rw - ext4 /dev/root rw"]
    for mount in mounts:
        root, place, kind, options = mount.split("|")
        lines.append(f"30 22 0:26 {root} {place} rw,nosuid shared:4 - {kind} {kind} {options}")
    (folder / "mountinfo").write_text("\n".join(lines) + "\n")
    return folder


def _group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(text)


def test_the_cgroup_v2_quota_is_the_smallest_up_to_the_mount(tmp_path: Path) -> None:
    top = tmp_path / "unified"
    _group(top / "a" / "b", max="max 100000\n")
    _group(top / "a", max="150000 100000\n")
    proc = _proc(tmp_path / "proc", "0::/a/b\n", f"/|{top}|cgroup2|rw")
    assert find_processors(proc).quota == 1.5
    _group(top / "a" / "b", max="50000 100000\n")
    assert find_processors(proc).quota == 0.5


def test_the_quota_is_found_where_a_containers_mount_begins_at_its_own_group(tmp_path: Path) -> None:
    top = tmp_path / "with space" / "cpu,cpuacct"
    _group(top, cfs_quota_us="200000\n", cfs_period_us="100000\n")
    place = str(top).replace(" ", "\\040")
    told = ("5:cpuset:/\n4:cpu,cpuacct:/docker/1f\n0::/\n", "4:cpuacct,cpu:/../../1f\n")  # from inside, and outside
    for number, groups in enumerate(told):
        proc = _proc(tmp_path / f"proc{number}", groups, f"/docker/1f|{place}|cgroup|rw,cpu,cpuacct")
        assert find_processors(proc).quota == 2.0


@pytest.mark.parametrize("text", ["max 100000", "-1 100000", "", "many 100000", "100000 0"])
def test_a_missing_or_unlimited_quota_is_none(tmp_path: Path, text: str) -> None:
    _group(tmp_path / "top", max=text)
    proc = _proc(tmp_path / "proc", "0::/\n", f"/|{tmp_path / 'top'}|cgroup2|rw")
    assert find_processors(proc).quota is None


def test_allowed_processors_are_those_of_the_affinity_mask(tmp_path: Path) -> None:
    assert find_processors(tmp_path).allowed == len(os.sched_getaffinity(0))
    assert find_processors(tmp_path).quota is None


@pytest.mark.parametrize(
    ("allowed", "quota", "threads"), [(2, None, 2), (2, 1.0, 1), (8, 2.7, 2), (2, 0.3, 1), (2, 64.0, 2)]
)
def test_the_number_of_threads_is_what_the_quota_allows_all_the_time(
    allowed: int, quota: float | None, threads: int
) -> None:
    assert Processors(allowed, quota).threads == threads


def test_the_choice_is_explained_and_explicit_settings_take_precedence() -> None:
    limited = Processors(2, 1.0)
    assert str(choose_threads(None, limited, {})) == "2 cores allowed, CPU quota 1: 1 thread"
    assert str(choose_threads(None, Processors(1, None), {})) == "1 core allowed, no CPU quota: 1 thread"
    assert choose_threads(4, limited, {"OMP_NUM_THREADS": "2"}).number == 4
    wished = choose_threads(None, limited, {"OMP_NUM_THREADS": "3,2"})
    assert str(wished) == "2 cores allowed, CPU quota 1, OMP_NUM_THREADS 3: 3 threads"
    assert choose_threads(None, limited, {"OMP_NUM_THREADS": "many"}).number == 1


def test_waits_are_shortened_unless_configured_otherwise() -> None:
    fresh: dict[str, str] = {}
    shorten_waits(fresh)
    assert fresh == {"GOMP_SPINCOUNT": str(SPIN_COUNT), "KMP_BLOCKTIME": "1"}
    for wish in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7", "KMP_BLOCKTIME": "200"}):
        said = dict(wish)
        shorten_waits(said)
        assert said == wish


def test_the_engine_server_sets_the_wait_policy_before_its_threads_start() -> None:
    """The library reads the environment when it is loaded, and prints the values."""
    code = "import sys; sys.argv[1:] = ['--help']; import engine.server.app"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in told.stderr or "KMP_BLOCKTIME='1" in told.stderr.replace(" ", "")
