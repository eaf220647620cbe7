"""A batch of a file while processes of every role are killed: every line has one result, and is billed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos.batch_file import run_batch

LINES = 600

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_each_line_of_a_file_has_one_result_whatever_is_killed(tmp_path: Path) -> None:
    came = run_batch(tmp_path, LINES, every=3.0, limit=600.0)
    assert (came["status"], came["lines_out"], came["different_ids"], came["in_order"]) == (
        "completed",
        LINES,
        LINES,
        True,
    )
    assert came["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert came["jobs"] == LINES
    assert came["tokens_of_lines"] == came["tokens_of_batch"] > 0
    assert set(came["kills"]) >= {"worker", "api"}
