"""Search in the archive of ended jobs, and Redis' memory before and after they are moved there.

python -m benchmarks.service.archive [JOBS [OUT]]

It fills an archive in SQLite with a million made-up jobs (or JOBS), and measures one page of 20 jobs for each filter
alone, for combinations, and for those that nothing matches. Then it moves 2,000 jobs with journals out of an embedded
broker. It prints one JSON document, and writes it with a table into the folder OUT.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from sqlalchemy import text

from benchmarks.service.export_memory import SOLUTIONS, fill
from workers.archive.archive import Archive
from workers.archive.filters import JobFilter, split_words
from workers.archive.record import JobRecord
from workers.broker.archiver import Archiver
from workers.broker.embedded import EmbeddedBroker
from workers.store.jobs import JobStore

JOBS: Final = 1_000_000
MOVED: Final = 2_000
"""Jobs of the broker whose memory is measured."""
REPEATS: Final = 20
PAGE: Final = 21
"""Rows of a page of 20: one more shows whether there are others."""
MADE: Final = 15_625
"""Jobs that are made up; the others are copies of them at other times."""
_ROWS: Final = 2_000
"""Jobs of one transaction."""
_COPIED: Final = {
    "jobs": (
        *("id", "owner", "status", "dead", "strategy", "model", "name", "batch"),
        *("created", "finished_ms", "seq", "fields"),
    ),
    "journals": ("entries",),
    "metadata_pairs": ("digest",),
    "job_words": ("words",),
}
"""Columns of the tables besides the position."""
_CHANGES: Final = {
    "id": "printf('job_%032x', n + :count)",
    "created": "created + :count",
    "finished_ms": "finished_ms + 1000 * :count",
}
_START: Final = 1_700_000_000
_VOCABULARY: Final = [f"word{index}" for index in range(5_000)]
_WEIGHTS: Final = [1 / (index + 1) for index in range(len(_VOCABULARY))]


def make_record(n: int, source: random.Random) -> JobRecord:
    """Return a made-up job. The most frequent owner has half of all jobs, and one in 10,000 jobs has a rare word."""
    words = source.choices(_VOCABULARY, _WEIGHTS, k=20)
    words += ["zyzzyva"] if n % 10_000 == 7 else []
    status = source.choices(("completed", "failed", "cancelled", "incomplete"), (90, 5, 3, 2))[0]
    spec = {
        "problem": " ".join(words),
        "strategy": {"name": f"strategy{source.randrange(10)}", "n": 16},
        "model": f"model{source.choices(range(5), (60, 30, 8, 1.9, 0.1))[0]}",
        "metadata": {"env": "prod", "user": str(source.randrange(10_000))},
        "budget": {"tokens": 20_000, "seconds": 300},
        "priority": "interactive",
    }
    if n % 5 == 0:
        spec["name"] = f"name{source.randrange(20)}"
    owner = "large" if source.random() < 0.5 else f"owner{source.randrange(200)}"
    result = {"answer": "24", "text": "24", "confidence": 0.9, "finish_reason": "answer", "node": "0"}
    created = _START + n
    fields = {"id": f"job_{n:032x}", "n": str(n), "owner": owner, "status": status, "created": f"{created}.250"}
    fields |= {"started": f"{created + 1}.000", "finished": f"{created + 9}.000", "attempt": "1", "seq": "9"}
    fields |= {"spec": json.dumps(spec), "result": json.dumps(result), "error": "null"}
    return JobRecord(fields, [("1-0", {"type": "job.queued", "at": fields["created"], "data": "{}"})])


def list_filters(jobs: int) -> dict[str, tuple[JobFilter, str | None, int | None]]:
    """Return filters with the owner, and the position behind which the page begins, by name."""
    middle = _START + jobs / 2
    rare, common = split_words("zyzzyva"), split_words("word0 word1")
    return {
        "no filter": (JobFilter(), None, None),
        "no filter, page in the middle": (JobFilter(), None, jobs // 2),
        "owner (50 %)": (JobFilter(), "large", None),
        "owner (0.25 %)": (JobFilter(), "owner7", None),
        "status (5 %)": (JobFilter("failed"), None, None),
        "status dead (0 %)": (JobFilter("dead"), None, None),
        "strategy (10 %)": (JobFilter(strategy="strategy3"), None, None),
        "model (0.1 %)": (JobFilter(model="model4"), None, None),
        "model (0 %)": (JobFilter(model="nobody"), None, None),
        "name (1 %)": (JobFilter(name="name7"), None, None),
        "metadata (100 %)": (JobFilter(metadata={"env": "prod"}), None, None),
        "metadata (0.01 %)": (JobFilter(metadata={"user": "77"}), None, None),
        "metadata (100 % and 0.01 %)": (JobFilter(metadata={"env": "prod", "user": "77"}), None, None),
        "created, an hour in the middle": (JobFilter(created_after=middle, created_before=middle + 3600), None, None),
        "created before the middle": (JobFilter(created_before=middle), None, None),
        "words (frequent)": (JobFilter(words=common), None, None),
        "words (0.01 %)": (JobFilter(words=rare), None, None),
        "words (frequent), of a rare owner": (JobFilter(words=common), "owner7", None),
        "words (frequent), status 5 %, strategy 10 %": (JobFilter("failed", "strategy3", words=common), None, None),
        "owner 50 %, status 5 %, model 0.1 %": (JobFilter("failed", model="model4"), "large", None),
        "owner 50 %, strategy 10 %, metadata 0.01 %": (
            JobFilter(strategy="strategy3", metadata={"user": "77"}),
            "large",
            None,
        ),
        "status 5 %, model 0 %": (JobFilter("failed", model="nobody"), None, None),
    }


async def measure_search(archive: Archive, jobs: int) -> list[dict[str, Any]]:
    """Return the rows found, and the median and longest time in milliseconds of each filter."""
    rows = []
    for name, (wanted, owner, before) in list_filters(jobs).items():
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            found = await archive.list_jobs(wanted, owner=owner, before=before, limit=PAGE)
            times.append((time.perf_counter() - start) * 1000)
        rows.append(
            {
                "filter": name,
                "jobs": len(found),
                "first_ms": round(times[0], 1),
                "median_ms": round(statistics.median(times), 1),
                "max_ms": round(max(times), 1),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


async def fill_archive(archive: Archive, jobs: int) -> dict[str, Any]:
    """Store made-up jobs, then copies of them. Return the number of jobs, and those stored one by one in a second."""
    source = random.Random(0)
    num_made = min(jobs, MADE)
    begin, seconds = 1, 0.0
    while begin <= num_made:
        records = [make_record(n, source) for n in range(begin, min(begin + _ROWS, num_made + 1))]
        start = time.perf_counter()
        await archive.save(records)
        seconds += time.perf_counter() - start
        begin += _ROWS
    count = num_made
    while 2 * count <= jobs:
        async with archive.engine.begin() as connection:
            for table, columns in _COPIED.items():
                n = "rowid" if table == "job_words" else "n"
                values = ", ".join(_CHANGES.get(column, column) for column in columns)
                statement = (
                    f"INSERT INTO {table} ({n}, {', '.join(columns)}) SELECT {n} + :count, {values} FROM {table}"
                )
                await connection.execute(text(statement), {"count": count})
        count *= 2
        print(f"{count} jobs", file=sys.stderr)
    return {"jobs": count, "stored_a_second": round(num_made / seconds)}


async def measure_move(folder: Path) -> dict[str, Any]:
    """Return Redis' memory per ended job before and after the move, and the jobs moved a second."""
    with EmbeddedBroker(folder / "broker") as broker:
        archive = Archive(f"sqlite:///{folder / 'moved.sqlite3'}")
        store = JobStore(broker.url, retry_seconds=60.0, archive=archive)

        async def read_memory() -> int:
            await store.command("MEMORY", "PURGE")
            return int((await store.command("INFO", "memory"))["used_memory_dataset"])

        empty = await read_memory()
        await fill(store, MOVED)
        full = await read_memory()
        archiver = Archiver(store, archive, age=0, retention=1e6)
        begin = time.perf_counter()
        while await archiver.move():
            pass
        seconds = time.perf_counter() - begin
        moved = await read_memory()
        await store.close()
    size = (folder / "moved.sqlite3").stat().st_size
    return {
        "jobs": MOVED,
        "redis_bytes_a_job_before": round((full - empty) / MOVED),
        "redis_bytes_a_job_after": round((moved - empty) / MOVED),
        "archive_bytes_a_job": round(size / MOVED),
        "moved_a_second": round(MOVED / seconds),
    }


async def measure(jobs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="archive-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        archive = Archive(f"sqlite:///{folder / 'archive.sqlite3'}")
        filled = await fill_archive(archive, jobs)
        search = await measure_search(archive, filled["jobs"])
        await archive.close()
        size = round((folder / "archive.sqlite3").stat().st_size / filled["jobs"])
        return {**filled, "bytes_a_job": size, "search": search, "move": await measure_move(folder)}


def render_table(result: dict[str, Any]) -> str:
    """Return the results as a page in Markdown."""
    move = result["move"]
    lines = [
        "`python -m benchmarks.service.archive 1000000 benchmarks/results/archive`",
        "",
        f"{os.cpu_count()} cores, shared with other work. SQLite {sqlite3.sqlite_version}, {result['jobs']:,} jobs, "
        f"{result['bytes_a_job']:,} bytes each. A page of 20 jobs, {REPEATS} times; the percentages are of the jobs "
        "that a filter wants.",
        "",
        "| filter | jobs on the page | median ms | longest ms |",
        "|---|---:|---:|---:|",
    ]
    for row in result["search"]:
        found = min(row["jobs"], PAGE - 1)
        lines.append(f"| {row['filter']} | {found} | {row['median_ms']:.1f} | {row['max_ms']:.1f} |")
    lines += [
        "",
        f"A job with a journal of {SOLUTIONS} solutions takes {move['redis_bytes_a_job_before']:,} bytes of Redis' "
        f"memory before it is moved and {move['redis_bytes_a_job_after']:,} after, and {move['archive_bytes_a_job']:,} "
        f"bytes of the archive; {move['moved_a_second']} of them are moved a second ({move['jobs']:,} jobs).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else JOBS
    result = asyncio.run(measure(jobs))
    print(json.dumps(result))
    if len(sys.argv) > 2:
        folder = Path(sys.argv[2])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / "table.md").write_text(render_table(result))


if __name__ == "__main__":
    main()
