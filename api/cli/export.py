"""``reasoner export``: jobs that have ended, as training data, in a file that a later call goes on with."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from rich.console import Console

from api.cli.options import Connection, expand_options, parse_time
from reasoner.client import Client
from reasoner.training_data.parquet import MissingParquet, ParquetRows, read_last_row
from reasoner.training_data.selection import JOBS, FileKind, FormatName

PART_BYTES = 64 << 20
"""Size of the rows of a Parquet part, as JSON: so much is written again after a kill, at most."""
_progress = Console(stderr=True)

Rows = Iterator[tuple[dict[str, Any], str]]
"""Rows, each with its line."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The jobs of an export. All conditions that are given hold."""

    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Jobs that ended since then: 2d, 12h, 2026-01-31, or seconds since 1970."),
    ] = None
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Jobs that ended before then.")] = None
    status: Annotated[str | None, typer.Option(help="Only jobs that ended with this status.")] = None
    strategy: Annotated[str | None, typer.Option(help="Only jobs of this strategy.")] = None
    model: Annotated[str | None, typer.Option(help="Only jobs of this model, or of this name.")] = None
    min_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Only jobs whose chosen solution has at least this score.")
    ] = None
    min_confidence: Annotated[
        float | None, typer.Option(min=0, max=1, help="Only jobs whose result has at least this confidence.")
    ] = None
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only jobs with this metadata. May be repeated.")
    ] = None

    def build_query(self) -> dict[str, Any]:
        """Return the parameters of the route."""
        times = {"since": self.since, "until": self.until}
        return {
            **{name: parse_time(text, f"--{name}") for name, text in times.items() if text is not None},
            **{name: getattr(self, name) for name in ("status", "strategy", "model", "min_score", "min_confidence")},
            "metadata": self.metadata or [],
        }


@expand_options
def export(
    service: Connection,
    conditions: Conditions,
    format: Annotated[FormatName, typer.Option(help="Kind of rows.")] = JOBS,
    file: Annotated[FileKind, typer.Option(help="Kind of file.")] = "jsonl",
    out: Annotated[
        Path | None,
        typer.Option(help="A new file; of Parquet a folder for parts. Without it JSON Lines go to stdout."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what --out holds, with the same conditions as before.")
    ] = False,
    by: Annotated[
        str | None, typer.Option(help="What says which solutions are right: score or answer. Default: scores, if any.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(min=0, max=1, help="Least difference of the scores of a pair.")
    ] = None,
) -> None:
    """Export jobs that have ended, as they are or as training data.

    They are in the order in which they ended. stderr says how many jobs were left out, and why. After a kill, --resume
    goes on so that each job is there once.
    """
    query = conditions.build_query() | {"format": format, "by": by, "margin": margin}
    if format != JOBS:
        query["summary"] = True
    target = _choose_target(format, file, out, resume)
    with service.connect() as client, target:
        target.write(_read_rows(client, query | target.position))


def _choose_target(format: FormatName, file: FileKind, out: Path | None, resume: bool) -> Target:
    """Return where the rows go. Raises ``typer.BadParameter`` for options that contradict each other."""
    if out is None and (resume or file == "parquet"):
        option = "--resume" if resume else "--file parquet"
        raise typer.BadParameter("it needs --out, the file or folder of the export", param_hint=option)
    if file == "parquet" and format == JOBS:
        raise typer.BadParameter("jobs have no fixed columns: give --format, such as sft", param_hint="--file")
    if out is None:
        return Target()
    if file == "parquet":
        return Parts(out, format, resume)
    return LinesFile(out, "id" if format == JOBS else "job", resume)


def _read_rows(client: Client, query: dict[str, Any]) -> Rows:
    """Yield the rows of an export, and print its summary."""
    for line in client.export(**query):
        row = json.loads(line)
        if row.keys() == {"summary"}:
            summary = row["summary"]
            left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(summary["left_out"].items()))
            text = f"{summary['jobs']} jobs, {summary['rows']} rows" + (f"; left out: {left_out}" if left_out else "")
            _progress.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            yield row, line


class Target(contextlib.AbstractContextManager["Target"]):
    """The place of the rows: here stdout."""

    def __init__(self) -> None:
        self.position: dict[str, Any] = {}
        """Parameters of the route by which an export goes on where it was."""

    def __exit__(self, *_: object) -> None:
        return None

    def write(self, rows: Rows) -> None:
        """Write all rows."""
        for _, line in rows:
            print(line)


class LinesFile(Target):
    """A JSON Lines file. The rows of its last job may be incomplete, so that an export goes on with that job."""

    def __init__(self, path: Path, job_column: str, resume: bool) -> None:
        """Raises ``typer.BadParameter`` for a file that exists, or to go on with, has no such rows."""
        if path.exists() and not resume:
            raise typer.BadParameter(f"{path} exists: give --resume to go on, or another file", param_hint="--out")
        super().__init__()
        self._job_column = job_column
        self._file: BinaryIO = path.open("r+b" if path.exists() else "w+b")
        self._last_job: str | None = None
        self._start = self._end = 0
        """Offsets at which the last job's rows start, and at which whole rows end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            self._scan(path)
            stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _scan(self, path: Path) -> None:
        """Find the last job and the one before it."""
        previous: tuple[float, str] | None = None
        ended = 0.0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break  # of a process that was killed
            try:
                row = json.loads(line)
                job, time = str(row[self._job_column]), float(row["finished_at"])
            except (ValueError, KeyError, TypeError):
                raise typer.BadParameter(
                    f"line {number} of {path} is no row of this format: give another file", param_hint="--out"
                ) from None
            if job != self._last_job:
                previous = None if self._last_job is None else (ended, self._last_job)
                self._last_job, ended, self._start = job, time, self._end
            self._end += len(line)
        if self._last_job is not None:
            self.position = {"since": ended}
            if previous is not None and previous[0] == ended:
                self.position["after"] = previous[1]

    def write(self, rows: Rows) -> None:
        """Write all rows behind those that are there. The last job's are written anew, if the service still has it."""
        first = next(rows, None)
        is_same = first is not None and first[0][self._job_column] == self._last_job
        self._file.seek(self._start if is_same else self._end)
        self._file.truncate()
        for _, line in itertools.chain([] if first is None else [first], rows):
            self._file.write(line.encode() + b"\n")


class Parts(Target):
    """A folder of Parquet files. Each is there once it is whole, and has whole jobs."""

    def __init__(self, folder: Path, format: FormatName, resume: bool) -> None:
        """Raises ``typer.BadParameter`` for a folder with parts that are not to go on with."""
        super().__init__()
        self._format, self._folder = format, folder
        folder.mkdir(parents=True, exist_ok=True)
        parts = sorted(folder.glob("part-*.parquet"))
        if parts and not resume:
            raise typer.BadParameter(f"{folder} has parts: give --resume to go on, or another", param_hint="--out")
        self._number = len(parts)
        try:
            if parts:
                job, ended = read_last_row(parts[-1], format)
                self.position = {"since": ended, "after": job}
            else:
                ParquetRows(format)
        except MissingParquet as error:
            raise typer.BadParameter(str(error), param_hint="--file") from None
        except ValueError as error:
            raise typer.BadParameter(f"{parts[-1]}: {error}", param_hint="--out") from None

    def write(self, rows: Rows) -> None:
        jobs = itertools.groupby(rows, key=lambda row: row[0]["job"])
        for _, first in jobs:
            self._write_part(itertools.chain([first], (more for _, more in jobs)))

    def _write_part(self, jobs: Iterable[Iterable[tuple[dict[str, Any], str]]]) -> None:
        """Write the next part with the first of these jobs, as many as it has room for."""
        path = self._folder / f"part-{self._number:05}.parquet"
        self._number += 1
        unfinished = path.with_suffix(".unfinished")
        file, num_bytes, num_jobs, num_rows = ParquetRows(self._format), 0, 0, 0
        with unfinished.open("wb") as target:
            for job in jobs:
                for row, line in job:
                    file.add([row])
                    num_bytes, num_rows = num_bytes + len(line), num_rows + 1
                num_jobs += 1
                if file.is_full:
                    target.write(file.flush())
                if num_bytes >= PART_BYTES:
                    break
            target.write(file.close({"jobs": num_jobs, "rows": num_rows}))
            target.flush()
            os.fsync(target.fileno())
        unfinished.rename(path)
        print(path, file=sys.stderr)
