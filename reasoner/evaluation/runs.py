"""Measurements of an evaluation in a JSON Lines file, one line per finished item, so that it can be resumed.

The first line is the header, with everything that determines the results. A file with another header belongs to another
evaluation and is rejected. If a crash has truncated the last line, it is dropped when the file is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

RUNS_FILE = "runs.jsonl"
FORMAT = 1


class EvaluationMismatch(ValueError):
    """The file holds the runs of another evaluation, or is damaged; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one strategy on one problem with one seed.

    For a pooled strategy the numbers are means over many subsamples of the pool, so ``correct`` is a fraction. For a
    live search ``correct`` is 0 or 1.
    """

    model: str
    strategy: str
    n: int
    seed: int
    problem: str
    correct: float
    reached: float
    """1 if any candidate passes the suite's check: the accuracy of an ideal choice among them."""
    answered: float
    """1 if there was an answer. A run without one is not correct."""
    samples: float
    """Number of finished branches: solutions, or steps in a tree."""
    tokens: float
    verifier_tokens: float
    flops: float
    """FLOPs: two per weight and computed token, including prompts, without rejected draft tokens."""
    seconds: float
    """Working time of the job, with others running concurrently; for a subsample, its share of the pool's time."""


@dataclass(frozen=True, slots=True)
class FinishedItem:
    """A finished item: all runs of one problem at one stage of the plan.

    ``failed`` is the reason if there are none, because the problem cannot be run (it exceeds the model's context, for
    example).
    """

    stage: str
    seed: int
    problem: str
    runs: tuple[Run, ...] = ()
    failed: str | None = None


@dataclass(slots=True)
class RunFile:
    """The finished items of one evaluation, in memory and, with a folder, in its ``runs.jsonl``; a context manager."""

    header: Mapping[str, Any]
    folder: Path | None = None
    items: list[FinishedItem] = field(default_factory=list)
    _file: Any = None

    def __enter__(self) -> Self:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._open(self.folder / RUNS_FILE)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, item: FinishedItem) -> None:
        """Add an item; its line is written when this returns."""
        self.items.append(item)
        if self._file is not None:
            self._file.write(_line(asdict(item)))

    def done(self) -> set[tuple[str, int, str]]:
        """Return (stage, seed, problem) of every item."""
        return {(item.stage, item.seed, item.problem) for item in self.items}

    def _open(self, path: Path) -> None:
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvaluationMismatch(f"{path} is being written by another process: wait for it") from None
        self._file.seek(0)
        content: bytes = self._file.read()
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):  # a crash truncated the last line
            self._file.truncate(len(complete))
            self._file.seek(0, os.SEEK_END)
        header = {"format": FORMAT, **self.header}
        if not complete:
            self._file.write(_line(header))
            return
        lines = complete.splitlines()
        self._check_header(path, _parse(path, 1, lines[0]), json.loads(_line(header)))
        self.items = [_parse_item(path, number, line) for number, line in enumerate(lines[1:], 2)]

    @staticmethod
    def _check_header(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
        names = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
        if names:
            differences = "; ".join(
                f"{name} is {_shorten(found.get(name))} there and {_shorten(expected.get(name))} here" for name in names
            )
            raise EvaluationMismatch(
                f"{path} is of another evaluation: {differences}. Use another folder, or delete that file"
            )


def collect_runs(items: Iterable[FinishedItem]) -> list[Run]:
    """Return the runs of all items."""
    return [run for item in items for run in item.runs]


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise EvaluationMismatch(f"{path}, line {number}: not JSON ({error}); delete the file to start anew") from None
    if not isinstance(value, dict):
        raise EvaluationMismatch(f"{path}, line {number}: not a JSON object; delete the file to start anew")
    return value


def _parse_item(path: Path, number: int, line: bytes) -> FinishedItem:
    value = _parse(path, number, line)
    try:
        return FinishedItem(**{**value, "runs": tuple(Run(**run) for run in value["runs"])})
    except (KeyError, TypeError) as error:
        raise EvaluationMismatch(f"{path}, line {number}: not a run ({error}); delete the file to start anew") from None


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
