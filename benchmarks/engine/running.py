"""The systems of a run: ours, without which there is none, and peers, each of which is left out once it fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from benchmarks.engine.process import BenchError, Worker

T = TypeVar("T")

_LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A peer that is missing from results, and the reason."""

    peer: str
    stage: str
    """The model and the case at which it failed; empty for a peer that the whole run lacks."""
    reason: str

    def describe(self) -> str:
        """Return the peer and the reason in one line."""
        stage = f" ({self.stage})" if self.stage else ""
        return f"{self.peer} is left out{stage}: {self.reason}"


@dataclass(slots=True)
class Systems:
    """The running workers by name. Ends them on exit."""

    peers: Collection[str]
    """Names of those that may fail."""
    say: Callable[[str], None]
    left_out: list[LeftOut]
    """Gets the peers that fail."""
    workers: dict[str, Worker] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # the rest ends although one does not
            for worker in self.workers.values():
                stack.callback(worker.close)

    def start(self, name: str, stage: str, start: Callable[[], Worker]) -> None:
        """Add the worker that ``start`` returns. Raises ``BenchError`` if our own system cannot be started."""
        with self.allow_failure(name, stage):
            self.workers[name] = start()

    def run_each(self, stage: str, work: Callable[[str, Worker], T]) -> dict[str, T]:
        """Return the results of ``work`` on each system, in turn, without those that fail and are left out from here
        on. Raises ``BenchError`` if our own fails.
        """
        results: dict[str, T] = {}
        for name, worker in list(self.workers.items()):
            with self.allow_failure(name, stage):
                results[name] = work(name, worker)
        return results

    @contextmanager
    def allow_failure(self, name: str, stage: str) -> Iterator[None]:
        """Leave out a peer whose work in this block fails. Raises ``BenchError`` if our own fails."""
        try:
            yield
        except BenchError as error:
            if name not in self.peers:
                raise
            self.leave_out(name, stage, str(error))

    def leave_out(self, name: str, stage: str, reason: str) -> None:
        """End a peer's worker, and say why."""
        leave_out(LeftOut(name, stage, shorten_reason(reason)), self.left_out, self.say)
        worker = self.workers.pop(name, None)
        if worker is not None:
            worker.close()


def leave_out(peer: LeftOut, left_out: list[LeftOut], say: Callable[[str], None]) -> None:
    """Add a peer to those that are left out, and say so in one line."""
    left_out.append(peer)
    say(peer.describe())


def shorten_reason(reason: str) -> str:
    """Return one printable line: of several, the first, which names the system, and the last, which libraries end with
    the cause.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    text = " ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    text = "".join(sign if sign.isprintable() else " " for sign in text)
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
