"""The benchmark of the archive: its jobs are found as they were made, and its table has every row."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.service import archive


def test_every_filter_finds_what_it_says_and_the_table_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MADE", 250)
    monkeypatch.setattr(archive, "MOVED", 25)  # far more than Redis' own buffers, which shrink when they like
    monkeypatch.setattr(archive, "REPEATS", 1)
    result = asyncio.run(archive.measure(1000))
    assert result["jobs"] == 1000
    found = {row["filter"]: row["jobs"] for row in result["search"]}
    assert found["no filter"] == found["metadata (100 %)"] == found["words (frequent)"] == archive.PAGE
    assert found["words (0.01 %)"] == 4  # the seventh job and its copies
    assert found["model (0 %)"] == found["status 5 %, model 0 %"] == 0
    assert result["move"]["redis_bytes_a_job_after"] < result["move"]["redis_bytes_a_job_before"]
    table = archive.render_table(result)
    assert all(f"| {name} |" in table for name in found)
