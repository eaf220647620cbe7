"""What an evaluation measured, one line of JSON for each finished piece of work, so that it can be resumed.

The first line is the header: everything that decides the numbers. A folder whose header differs is another evaluation
and is refused. A line that a crash tore is the last one, and is dropped when the file is opened again.
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
    """The folder holds the runs of another evaluation; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one strategy made of one problem with one seed.

    A strategy that decides on a pool of samples has many draws from it: its numbers are means over them, so ``correct``
    is a share. A live search has one run, and ``correct`` is 0 or 1.
    """

    model: str
    strategy: str
    n: int
    seed: int
    problem: str
    correct: float
    reached: float
    """Whether any candidate passes the suite's rule: what the search reaches when the rule picks among them."""
    answered: float
    """Whether there was an answer at all; none is an abstention, and not correct."""
    samples: float
    """Branches that ended: solutions, or pieces of them in a tree."""
    tokens: float
    verifier_tokens: float
    flops: float
    """Two per weight and computed token of the search itself, prompts included; a drafter's wrong guesses are not."""
    seconds: float
    """Working time of the job while others ran beside it. A draw of a pool has its share of the pool's time."""


@dataclass(frozen=True, slots=True)
class FinishedItem:
    """A finished piece of work: every run that came of one problem at one stage of the plan.

    ``failed`` says why there are none: the problem can never be run (it does not fit into the model, for example).
    """

    stage: str
    seed: int
    problem: str
    runs: tuple[Run, ...] = ()
    failed: str | None = None


@dataclass(slots=True)
class RunFile:
    """The pieces of one evaluation, in memory and, with a folder, in its ``runs.jsonl``. Use as a context manager."""

    header: Mapping[str, Any]
    folder: Path | None = None
    pieces: list[FinishedItem] = field(default_factory=list)
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

    def add(self, piece: FinishedItem) -> None:
        """Keeps a piece; on return the operating system has its line."""
        self.pieces.append(piece)
        if self._file is not None:
            self._file.write(_line(asdict(piece)))

    def done(self) -> set[tuple[str, int, str]]:
        """(stage, seed, problem) of every piece."""
        return {(piece.stage, piece.seed, piece.problem) for piece in self.pieces}

    def _open(self, path: Path) -> None:
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EvaluationMismatch(f"{path} is being written by another process: wait for it") from None
        self._file.seek(0)
        content: bytes = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # a crash tore the last line
            self._file.truncate(len(whole))
            self._file.seek(0, os.SEEK_END)
        header = {"format": FORMAT, **self.header}
        if not whole:
            self._file.write(_line(header))
            return
        lines = whole.splitlines()
        self._check(path, _parse(path, 1, lines[0]), json.loads(_line(header)))
        self.pieces = [_piece(path, number, line) for number, line in enumerate(lines[1:], 2)]

    @staticmethod
    def _check(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
        names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if names:
            told = "; ".join(
                f"{name} is {_short(there.get(name))} there and {_short(here.get(name))} here" for name in names
            )
            raise EvaluationMismatch(
                f"{path} is of another evaluation: {told}. Take another folder, or delete that file"
            )


def collect_runs(pieces: Iterable[FinishedItem]) -> list[Run]:
    return [run for piece in pieces for run in piece.runs]


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


def _piece(path: Path, number: int, line: bytes) -> FinishedItem:
    value = _parse(path, number, line)
    try:
        return FinishedItem(**{**value, "runs": tuple(Run(**run) for run in value["runs"])})
    except (KeyError, TypeError) as error:
        raise EvaluationMismatch(f"{path}, line {number}: not a run ({error}); delete the file to start anew") from None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
