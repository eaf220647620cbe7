"""``reasoner export``: files that a later call goes on with, so that each job is there once, whenever it was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from api.cli import export as cli_export
from api.cli.entry.app import app
from api.cli.options import Connection
from reasoner.client import ServiceError
from reasoner.training_data import parquet

Row = dict[str, Any]


class FakeService:
    """A client of a service with these rows, in their order, that breaks off before one of them."""

    def __init__(self, rows: list[Row], breaks_at: int | None = None) -> None:
        self.rows = rows
        self.breaks_at = breaks_at
        self.queries: list[dict[str, Any]] = []

    def __enter__(self) -> FakeService:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def export(self, *, since: float = 0.0, after: str | None = None, **query: Any) -> Iterator[str]:
        self.queries.append({"since": since, "after": after, **query})
        for number, row in enumerate(self.rows):
            if number == self.breaks_at:
                raise ServiceError("the export broke off")
            if row["finished_at"] > since or (row["finished_at"] == since and row["job"] > (after or "")):
                yield json.dumps(row)
        if query.get("summary"):
            yield json.dumps({"summary": {"jobs": 2, "rows": len(self.rows), "left_out": {"no_answer": 3}}})


def make_rows(jobs: list[tuple[int, int]]) -> list[Row]:
    """Return the rows of jobs, given by the seconds after the one before, and the number of rows."""
    rows, time = [], 1.0
    for number, (seconds, count) in enumerate(jobs):
        time += seconds / 1000
        messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "2"}]
        rows += [{"job": f"job_{number:03}", "finished_at": time, "messages": messages}] * count
    return rows


def run(service: FakeService, *options: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "connect", lambda _: service)
        return CliRunner().invoke(app, ["export", "--format", "sft", *options], env={"COLUMNS": "200"})


JOBS = st.lists(st.tuples(st.sampled_from([0, 0, 1]), st.integers(1, 3)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(JOBS, st.data())
def test_a_file_cut_anywhere_becomes_the_whole_one(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[int, int]], data: st.DataObject
) -> None:
    path, rows = tmp_path_factory.mktemp("cut") / "rows.jsonl", make_rows(jobs)
    assert run(FakeService(rows), "--out", str(path)).exit_code == 0
    whole = path.read_bytes()
    assert [json.loads(line) for line in whole.splitlines()] == rows
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    assert run(FakeService(rows), "--out", str(path), "--resume").exit_code == 0
    assert path.read_bytes() == whole


@settings(max_examples=30, deadline=None)
@given(JOBS, st.data())
def test_parts_go_on_behind_the_last_whole_one(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[int, int]], data: st.DataObject
) -> None:
    folder, rows = tmp_path_factory.mktemp("parts"), make_rows(jobs)
    options = ["--file", "parquet", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_export, "PART_BYTES", 250)
        patch.setattr(parquet, "ROW_GROUP_BYTES", 100)
        broken = FakeService(rows, breaks_at=data.draw(st.integers(0, len(rows) - 1))) if rows else None
        if broken is not None:
            assert isinstance(run(broken, *options).exception, ServiceError)
        assert run(FakeService(rows), *options, "--resume").exit_code == 0
    parts = sorted(folder.glob("*.parquet"))
    found = [[row["job"] for row in pq.read_table(part).to_pylist()] for part in parts]
    assert [job for part in found for job in part] == [row["job"] for row in rows]
    assert all(before[-1] < part[0] for before, part in pairwise(found))


def test_a_last_job_that_is_gone_keeps_its_rows(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.jsonl", make_rows([(0, 1), (1, 2), (1, 1)])
    assert run(FakeService(rows[:3]), "--out", str(path)).exit_code == 0
    assert run(FakeService(rows[3:]), "--out", str(path), "--resume").exit_code == 0
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_lines_go_to_stdout_and_the_summary_to_stderr() -> None:
    rows = make_rows([(0, 1), (1, 1)])
    result = run(FakeService(rows))
    assert [json.loads(line) for line in result.stdout.splitlines()] == rows
    assert result.stderr == "2 jobs, 2 rows; left out: 3 no_answer\n"


def test_conditions_become_parameters_of_the_route() -> None:
    service = FakeService([])
    result = run(service, "--since", "5", "--strategy", "beam", "--metadata", "a=1", "--metadata", "b=2")
    assert result.exit_code == 0
    (query,) = service.queries
    assert {name: value for name, value in query.items() if value is not None} == {
        **{"since": 5.0, "strategy": "beam", "metadata": ["a=1", "b=2"], "format": "sft", "summary": True}
    }


def test_wrong_usage_says_what_would_be_right(tmp_path: Path) -> None:
    old, other = tmp_path / "old.jsonl", tmp_path / "other.jsonl"
    assert run(FakeService(make_rows([(0, 1)])), "--out", str(old)).exit_code == 0
    other.write_text('{"text": "no row"}\n')
    (tmp_path / "part-00000.parquet").write_bytes(b"no Parquet")
    parts = ["--file", "parquet", "--out", str(tmp_path)]
    for options, remedy in [
        (["--resume"], "it needs --out"),
        (["--file", "parquet"], "it needs --out"),
        (["--out", str(old)], "give --resume"),
        (["--out", str(other), "--resume"], "line 1"),
        (parts, "give --resume"),
        ([*parts, "--resume"], "no Parquet file"),
        ([*parts, "--format", "jobs"], "give --format"),
        (["--format", "dpo"], "preference"),
        (["--since", "yesterday"], "2d"),
    ]:
        result = run(FakeService([]), *options)
        assert result.exit_code == 2, result.output
        assert remedy in result.output
    assert len(old.read_text().splitlines()) == 1
    assert other.read_text() == '{"text": "no row"}\n'
