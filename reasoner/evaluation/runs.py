"""Measurements of an evaluation in a JSON Lines file, one line per finished item, so that it can be resumed.

The first line is the header, with everything that determines the results. A file with another header belongs to another
evaluation and is rejected. If a crash has truncated the last line, it is dropped when the file is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

RUNS_FILE = "runs.jsonl"
FORMAT = 3


class EvaluationMismatch(ValueError):
    """The file holds the runs of another evaluation, or is damaged; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one strategy on one problem with one seed; for a pooled strategy, means over subsamples of the pool."""

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
    thought_tokens: float
    """Generated tokens of thoughts, a part of ``tokens``."""
    verifier_tokens: float
    flops: float
    """FLOPs: two per weight and computed token, including prompts, without rejected draft tokens."""
    seconds: float
    """Working time of the job, with others running concurrently; for a subsample, its share of the pool's time."""
    correct_strict: float
    """1 if the answer is correct and the solution states it: ``correct`` without flexible answers."""
    flexible: float
    """1 if the answer was extracted at the flexible level."""
    cost: float = 0.0
    """Money, by the prices of the models."""
    budget: float | None = None
    """Limit of the job, in the quantity by which strategies are matched; ``None`` without one."""

    @property
    def total_tokens(self) -> float:
        return self.tokens + self.verifier_tokens


@dataclass(frozen=True, slots=True)
class FinishedItem:
    """All runs of one problem at one stage of the plan, or in ``failed`` the reason why it cannot be run."""

    stage: str
    seed: int
    problem: str
    runs: tuple[Run, ...] = ()
    failed: str | None = None


_ITEM = TypeAdapter(FinishedItem)
_HEADER = TypeAdapter(dict[str, Any])


@dataclass
class ItemFile(Generic[T]):
    """Finished items in memory and, with a folder, in a file of it; a context manager. Subclasses say which items."""

    name: ClassVar[str]
    adapter: ClassVar[TypeAdapter[Any]]

    header: Mapping[str, Any]
    folder: Path | None = None
    items: list[T] = field(default_factory=list)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the file, by which the same run is known when it is resumed."""
    _file: Any = None
    _is_new: bool = False

    def __enter__(self) -> Self:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._open(self.folder / self.name)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if self._file is None:
            return
        if kind is not None and self._is_new and not self.items:  # an error before the first item leaves nothing
            Path(self._file.name).unlink()
        self._file.close()

    def add(self, item: T) -> None:
        """Add an item; its line is written when this returns."""
        self.items.append(item)
        if self._file is not None:
            self._file.write(self.adapter.dump_json(item) + b"\n")

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
            self._is_new = True
            self._file.write(json.dumps(header | {"run": self.run}, separators=(",", ":")).encode() + b"\n")
            return
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                if number == 1:
                    stored = _HEADER.validate_json(line)
                    self.run = stored.pop("run", self.run)
                    _check_header(path, stored, json.loads(json.dumps(header)))
                else:
                    self.items.append(self.adapter.validate_json(line))
            except ValidationError as error:
                raise EvaluationMismatch(
                    f"{path}, line {number}: not a run ({error}); delete the file to start anew"
                ) from None


class RunFile(ItemFile[FinishedItem]):
    """The finished items of one evaluation."""

    name = RUNS_FILE
    adapter = _ITEM

    def done(self) -> set[tuple[str, int, str]]:
        """Return (stage, seed, problem) of every item."""
        return {(item.stage, item.seed, item.problem) for item in self.items}


def read_items(path: Path) -> tuple[dict[str, Any], list[FinishedItem]]:
    """Return the header and the items of a file of runs. Raises ``ValidationError`` for a damaged one."""
    first, *lines = path.read_bytes().splitlines()
    return _HEADER.validate_json(first), [_ITEM.validate_json(line) for line in lines]


def collect_runs(items: Iterable[FinishedItem]) -> list[Run]:
    """Return the runs of all items."""
    return [run for item in items for run in item.runs]


def _check_header(path: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    differences = "; ".join(
        f"{name} is {_shorten(stored.get(name))} there and {_shorten(expected.get(name))} here"
        for name in stored | expected
        if stored.get(name) != expected.get(name)
    )
    if differences:
        raise EvaluationMismatch(
            f"{path} is of another evaluation: {differences}. Use another folder, or delete that file"
        )


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
