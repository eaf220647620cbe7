"""``reasoner bench interference``: its windows with real services, and the rows that are made of them."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine.measure import Listener
from benchmarks.service.interference import (
    ALONE,
    ENDED_TARGET,
    PROTECTED,
    UNPROTECTED,
    InterferencePlan,
    measure,
)
from benchmarks.service.measure import quantile
from benchmarks.service.report import document, markdown


@pytest.mark.timeout(300)
def test_a_run_compares_the_three_ways_by_all_of_their_requests() -> None:
    steps: list[str] = []
    totals: list[int] = []
    plan = InterferencePlan(window=3.0, rate=4.0, load=0.2, max_tokens=4, samples=2)
    measured = measure(plan, Listener(total=totals.append, step=steps.append, say=lambda _: None))
    assert totals == [len(steps)]
    waits, ended = measured.runs["seconds to the first token"], measured.runs["share of the batch that ended"]
    assert waits.keys() == {ALONE, UNPROTECTED, PROTECTED}
    # The arrivals of all ways are the same, since they have the same seed.
    assert len({len(each) for each in waits.values()}) == 1
    assert ended.keys() == {UNPROTECTED, PROTECTED}
    assert all(0 <= share <= 1 for shares in ended.values() for share in shares)
    rows = {row.metric: row for row in measured.rows}
    yielding = rows[f"time to first token p99, {PROTECTED}"]
    assert yielding.ours == pytest.approx(1000 * quantile(waits[PROTECTED], 0.99))
    assert yielding.peer_value == pytest.approx(1000 * quantile(waits[ALONE], 0.99))
    assert rows[f"ended in the window, {PROTECTED}"].peer_value == ENDED_TARGET
    told = document(plan, measured)
    assert json.loads(json.dumps(told)) == told
    assert "beside a batch that yields" in markdown(told, "reasoner bench interference")
