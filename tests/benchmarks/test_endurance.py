"""``benchmarks.chaos.endurance``: a run of few jobs, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.endurance import endure, write_results


@pytest.mark.timeout(400)
def test_jobs_outlast_kills_and_are_counted_in_the_archive(tmp_path: Path) -> None:
    found = endure(600, seed=0)
    assert not any(found.bad.values())
    assert sum(found.kills.values()) > 0
    assert found.attempts >= 600
    assert 0 < found.max_mib < 200
    write_results(found, tmp_path, "endurance")
    page = (tmp_path / "table.md").read_text()
    assert "| jobs | 600 |" in page
    assert "| accepted jobs that the store does not know | 0 |" in page
