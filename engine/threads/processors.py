"""Count the threads a process should compute with, from its processors and its control group's quota.

A quota is a share of time, not of processors: a group with a quota of one CPU may run on all eight of a machine, and
with eight threads has used up its time after an eighth of each period. So the smaller number counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors that this process may run on."""

    allowed: int
    """Cores in its affinity mask."""
    quota: float | None
    """CPU time that its control group grants, in CPUs; ``None`` without a limit."""

    @property
    def threads(self) -> int:
        """Threads that can compute all the time. A fraction of a CPU does not count: threads that wait for each other
        are as slow as the slowest."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota)))

    def __str__(self) -> str:
        cores = f"{self.allowed} core{'' if self.allowed == 1 else 's'} allowed"
        return f"{cores}, no CPU quota" if self.quota is None else f"{cores}, CPU quota {self.quota:.4g}"


@dataclass(frozen=True, slots=True)
class ThreadCount:
    """A number of threads, and the reason for it."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.number} thread{'' if self.number == 1 else 's'}"


def find_processors(proc: Path = Path("/proc/self")) -> Processors:
    """Return the processors of this process. ``proc``: its folder in procfs, which only Linux has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processors(allowed, min(_iterate_quotas(proc), default=None))


def choose_threads(
    requested: int | None = None, processors: Processors | None = None, environ: Mapping[str, str] = os.environ
) -> ThreadCount:
    """Return ``requested``, else ``OMP_NUM_THREADS``, else the number that the processors allow."""
    processors = processors or find_processors()
    if requested is not None:
        return ThreadCount(requested, f"{processors}, --threads {requested}")
    configured = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if configured.isdigit() and int(configured) > 0:
        return ThreadCount(int(configured), f"{processors}, OMP_NUM_THREADS {configured}")
    return ThreadCount(processors.threads, str(processors))


def _iterate_quotas(proc: Path) -> Iterator[float]:
    """Yield the quotas of this process's control group and of its ancestors, in CPUs."""
    for folder in _iterate_folders(proc):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # groups without the controller have no such file


def _iterate_folders(proc: Path) -> Iterator[Path]:
    """Yield the folders of the process's control groups (v1 and v2) that may limit its time, up to the mounted one."""
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for mount in mounts:
        kind, _, options = mount[mount.index("-") + 1 :][:3]
        if kind == "cgroup2":
            paths = [path for number, _, path in groups if number == "0"]
        elif kind == "cgroup" and "cpu" in options.split(","):
            paths = [path for _, controllers, path in groups if "cpu" in controllers.split(",")]
        else:
            continue
        root, top = (PurePosixPath(name.encode().decode("unicode_escape")) for name in mount[3:5])
        for path in map(PurePosixPath, paths):
            # In a container the mount may begin at its own group, or the path may be relative to the host.
            inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
            yield from (Path(top / part) for part in (inside, *inside.parents))
