"""Count the threads a process should compute with, from its processors and its control group's quota. No torch.

A quota is a share of time, not of processors: a group with a quota of one CPU on a machine of eight may run on all of
them, and with eight threads has used up its time after an eighth of each period. So the smaller number counts.
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
    """CPUs' worth of time that its control group grants; ``None`` without a limit."""

    @property
    def threads(self) -> int:
        """Threads that can compute all the time. A part of a CPU is no further one: threads that wait for each other
        are as slow as the one that is held back."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota)))

    def __str__(self) -> str:
        cores = f"{self.allowed} core{'' if self.allowed == 1 else 's'} allowed"
        return f"{cores}, no CPU quota" if self.quota is None else f"{cores}, CPU quota {self.quota:.4g}"


@dataclass(frozen=True, slots=True)
class ThreadCount:
    """A number of threads, and why it is that."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.number} thread{'' if self.number == 1 else 's'}"


def find_processors(proc: Path = Path("/proc/self")) -> Processors:
    """Return what the kernel says now. ``proc`` is the process's folder there, which Linux alone has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processors(allowed, min(_quotas(proc), default=None))


def choose_threads(
    asked: int | None = None, processors: Processors | None = None, environ: Mapping[str, str] = os.environ
) -> ThreadCount:
    """Return the threads to compute with: those asked for, else ``OMP_NUM_THREADS``, else what the processors allow."""
    processors = processors or find_processors()
    if asked is not None:
        return ThreadCount(asked, f"{processors}, --threads {asked}")
    wished = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wished.isdigit() and int(wished) > 0:
        return ThreadCount(int(wished), f"{processors}, OMP_NUM_THREADS {wished}")
    return ThreadCount(processors.threads, str(processors))


def _quotas(proc: Path) -> Iterator[float]:
    """The quotas of this process's control group and of those that it is in, in CPUs."""
    for folder in _folders(proc):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # no limit that could be known: groups without the controller have no such file


def _folders(proc: Path) -> Iterator[Path]:
    """The folders of the process's control groups that may limit its time, of both versions, up to the mounted one."""
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
            # In a container the mount may begin at its own group, or the path be told from outside of it.
            inside = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
            yield from (Path(top / part) for part in (inside, *inside.parents))
