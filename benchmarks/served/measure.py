"""Measurement: all servers run, and take turns at each load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine.measure import OURS
from benchmarks.engine.process import BenchError
from benchmarks.engine.running import LeftOut, leave_out, shorten_reason
from benchmarks.served.aiperf import Level, Tool
from benchmarks.served.servers import Server, write_greedily


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """What is measured: the servers, ours first, and the numbers of streams at once."""

    servers: Sequence[Server]
    streams: Sequence[int]
    tool: Tool
    cores: Sequence[int]
    """Cores of the servers."""


@dataclass(slots=True)
class Served:
    """All results."""

    levels: list[Level] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def measure(plan: ServedPlan, folder: Path, say: Callable[[str], None]) -> Served:
    """Run the plan; logs and exports go to ``folder``. A peer that fails is left out from there on. Raises
    ``BenchError`` if our server fails.
    """
    with _Run(plan, folder, say) as run:
        run.served.versions["aiperf"] = plan.tool.find_version()
        for server in plan.servers:
            with run.allow_failure(server, "start"):
                run.start(server)
        for place, streams in enumerate(plan.streams):
            for server in plan.servers[:: -1 if place % 2 else 1]:
                if server.name in run.urls:
                    with run.allow_failure(server, f"{streams} streams"):
                        run.drive(server, streams)
    return run.served


class _Run:
    """The running servers, and what was measured on them."""

    def __init__(self, plan: ServedPlan, folder: Path, say: Callable[[str], None]) -> None:
        self.served = Served()
        self.urls: dict[str, str] = {}
        self._plan, self._folder, self._say = plan, folder, say
        self._ending: dict[str, ExitStack] = {}

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # the rest ends although one does not
            for ending in self._ending.values():
                stack.callback(ending.close)

    @contextmanager
    def allow_failure(self, server: Server, stage: str) -> Iterator[None]:
        """Leave out a peer whose work in this block fails. Raises ``BenchError`` if our own fails."""
        try:
            yield
        except BenchError as error:
            if server.name == OURS:
                raise
            leave_out(LeftOut(server.name, stage, shorten_reason(str(error))), self.served.left_out, self._say)
            self.urls.pop(server.name, None)
            self._ending.pop(server.name).close()

    def start(self, server: Server) -> None:
        """Start a server, and compare its greedy text with ours."""
        self._say(f"{server.name} starts")
        ending = self._ending[server.name] = ExitStack()
        url = ending.enter_context(server.run(self._plan.cores, self._folder / f"{server.name}.log"))
        text, ours = write_greedily(url), write_greedily(self.urls.get(OURS, url))
        if text != ours:
            raise BenchError(f"it does not compute the same model: its greedy text is {text!r}, ours {ours!r}")
        self.urls[server.name] = url
        self.served.versions[server.name] = server.find_version(url)

    def drive(self, server: Server, streams: int) -> None:
        """Measure a server at one load."""
        artifacts = self._folder / f"{server.name}-{streams}"
        artifacts.mkdir()
        level = self._plan.tool.drive(server.name, self.urls[server.name], streams, artifacts)
        self.served.levels.append(level)
        self._say(f"{server.name}, {streams} streams: {level.goodput:.2f} good requests/s, {level.first_p99:.0f} ms")
