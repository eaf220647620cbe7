"""The output of rollouts: one append-only JSONL file that is the training data and the account of what was paid.

Its lines, in the order in which they came about:

* ``{"settings": {…}}``, the first one: a file is only ever continued with the settings that it began with;
* ``{"piece": [key, solution, index], "text", "ids", "ended"}``: a step that the policy wrote;
* ``{"completion": [key, solution, step, index], "right", "tokens"}``: one completion of a step;
* ``{"solution": [key, index], "id", "question", "steps", "hard", "soft"}``: an example, complete.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prm.records import BadRecord, read_records

SolutionKey = tuple[str, int]
"""A problem's key, and which of its solutions."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What the policy wrote up to a separator, the separator included, or to the end."""

    text: str
    ids: tuple[int, ...]
    ended: bool


@dataclass(frozen=True, slots=True)
class LabelledSolution:
    """A solution's steps and labels. ``soft`` is ``None`` where completions ended early."""

    id: str
    question: str
    steps: tuple[str, ...]
    hard: tuple[int, ...]
    soft: tuple[float, ...] | None


class RolloutFile:
    """Use as a context manager: the file is locked, and a torn last line is cut off.

    In memory are the places of finished solutions, and what was paid for the unfinished ones.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Raises ``BadRecord`` for a file of other settings, one that somebody else writes, or a damaged one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.done: set[SolutionKey] = set()
        self.steps = 0
        """Steps of finished solutions, and those of them whose hard label is good."""
        self.good = 0
        self._pieces: dict[SolutionKey, dict[int, SampledStep]] = {}
        self._verdicts: dict[SolutionKey, dict[tuple[int, int], bool]] = {}
        try:
            self._lock(path)
            self._cut_torn_line()
            self._load(path, settings)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def pieces(self, place: SolutionKey) -> list[SampledStep]:
        """What was written of an unfinished solution."""
        known = self._pieces.get(place, {})
        return [known[index] for index in sorted(known)]

    def verdicts(self, place: SolutionKey, step: int) -> dict[int, bool]:
        """Completions of a step of an unfinished solution that were paid: whether each was right."""
        known = self._verdicts.get(place, {})
        return {index: right for (at, index), right in known.items() if at == step}

    def add_piece(self, place: SolutionKey, piece: SampledStep) -> None:
        """Books a piece, the next one of its solution."""
        known = self._pieces.setdefault(place, {})
        self._write({"piece": [*place, len(known)], "text": piece.text, "ids": piece.ids, "ended": piece.ended})
        known[len(known)] = piece

    def add_verdict(self, place: SolutionKey, step: int, index: int, *, right: bool, tokens: int) -> None:
        """Books a completion."""
        self._write({"completion": [*place, step, index], "right": right, "tokens": tokens})
        self._verdicts.setdefault(place, {})[step, index] = right

    def finish(self, place: SolutionKey, solution: LabelledSolution) -> None:
        """Writes the example of a solution."""
        line = {"solution": list(place), "id": solution.id, "question": solution.question, "steps": solution.steps}
        line |= {"hard": solution.hard} | ({} if solution.soft is None else {"soft": solution.soft})
        self._write(line)
        self._finished(place, solution.hard)

    def _write(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        while data:
            data = data[os.write(self._file, data) :]

    def _finished(self, place: SolutionKey, hard: tuple[int, ...]) -> None:
        self.done.add(place)
        self.steps += len(hard)
        self.good += sum(hard)
        self._pieces.pop(place, None)
        self._verdicts.pop(place, None)

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadRecord(f"{path} is being written by another run") from None

    def _cut_torn_line(self) -> None:
        """A run that was killed may leave half a line, and nothing stands behind it."""
        end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        os.ftruncate(self._file, end)

    def _load(self, path: Path, settings: Mapping[str, Any]) -> None:
        begun = False
        for record in read_records(path):
            fields = record.fields
            if "settings" in fields:
                _compare(path, fields["settings"], settings)
                begun = True
            elif not begun:
                raise BadRecord(f"{record.place}: the file does not begin with 'settings': it is no file of rollouts")
            elif "piece" in fields:
                key, solution, index = fields["piece"]
                piece = SampledStep(fields["text"], tuple(fields["ids"]), fields["ended"])
                self._pieces.setdefault((key, solution), {})[index] = piece
            elif "completion" in fields:
                key, solution, step, index = fields["completion"]
                self._verdicts.setdefault((key, solution), {})[step, index] = fields["right"]
            else:
                key, solution = fields["solution"]
                self._finished((key, solution), tuple(fields["hard"]))
        if not begun:
            self._write({"settings": settings})


def _compare(path: Path, begun: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for name in sorted({*begun, *asked}):
        if begun.get(name) != asked.get(name):
            raise BadRecord(
                f"{path} was begun with {name} {begun.get(name)!r}, and {asked.get(name)!r} is asked for: "
                "use the same, or another file"
            )
