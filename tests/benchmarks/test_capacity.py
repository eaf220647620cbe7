"""The command of the page on capacity."""

from __future__ import annotations

import pytest

from benchmarks.service.capacity import measure


@pytest.mark.timeout(200)
def test_a_job_is_measured_in_tokens_memory_and_bytes_on_disk() -> None:
    measured = measure(5)
    assert measured["generated tokens"] > 100
    assert measured["bytes of the append-only file"] > measured["generated tokens"]
    assert measured["bytes of memory"] > 0
