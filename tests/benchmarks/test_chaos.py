"""Chaos benchmark: planned disruptions, detected faults, and a short run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from benchmarks.chaos import measure as chaos_measure
from benchmarks.chaos.audit import BAD, Audit, check
from benchmarks.chaos.clients import Heard
from benchmarks.chaos.disruptions import Disruption, Planned, plan
from benchmarks.chaos.fleet import ROLES, Role
from benchmarks.chaos.measure import Chaos, ChaosPlan, measure, refusals, table
from benchmarks.chaos.report import document, markdown
from benchmarks.engine.measure import Listener, Measured

COUNTS: dict[Role, int] = {"worker": 3, "api": 2, "engine": 1, "broker": 1}


def drawn(seed: int, count: int) -> list[Planned]:
    return list(itertools.islice(plan(seed, COUNTS), count))


def test_a_seed_determines_all_disruptions_and_every_role_is_hit_equally_often() -> None:
    first = drawn(3, 80)
    assert first == drawn(3, 80) != drawn(4, 80)
    assert Counter(planned.role for planned in first) == dict.fromkeys(ROLES, 20)
    assert {(planned.role, planned.number) for planned in first} == {
        (role, number) for role, count in COUNTS.items() for number in range(count)
    }
    assert {planned.how for planned in first} == {"killed", "terminated", "frozen"}


def entry(seq: int, kind: str, key: str | None = None, generated: int = 0) -> dict[str, Any]:
    keyed = {} if key is None else {"key": key, "spend": json.dumps({"generated": generated})}
    return {"seq": f"{seq}-0", "type": kind, **keyed}


GOOD = [
    entry(1, "job.queued"),
    entry(2, "node", "a", 3),
    entry(3, "node", "b", 4),
    entry(4, "job.completed"),
]
FIELDS = {"status": "completed", "usage:generated": "7"}


@pytest.mark.parametrize(
    ("fields", "log", "kinds"),
    [
        ({}, GOOD, []),
        ({"status": "in_progress"}, GOOD[:3], ["hanging"]),
        ({}, [*GOOD, entry(5, "job.completed")], ["twice"]),
        ({}, [*GOOD, entry(5, "node", "c")], ["twice"]),
        ({}, [GOOD[0], entry(2, "node", "a", 7), entry(4, "job.completed")], ["gaps"]),
        ({}, [GOOD[0], GOOD[1], entry(3, "node", "a", 4), GOOD[3]], ["gaps"]),
        ({"usage:generated": "8"}, GOOD, ["bills"]),
        ({"usage:prompt": "1"}, GOOD, ["bills"]),
        ({"status": "failed", "error": '{"code": "max_attempts"}'}, [*GOOD[:3], entry(4, "job.failed")], ["burnt"]),
        ({"status": "failed", "error": '{"code": "engine_error"}'}, [*GOOD[:3], entry(4, "job.failed")], ["failed"]),
        ({"status": "cancelled"}, [*GOOD[:3], entry(4, "job.cancelled")], ["failed"]),
    ],
)
def test_every_fault_of_a_job_is_detected(fields: dict[str, str], log: list[dict[str, Any]], kinds: list[str]) -> None:
    assert [kind for kind, _ in check(FIELDS | fields, log)] == kinds


def found(role: Role, seconds: float | None) -> Disruption:
    return Disruption(Planned(role, 0, "killed", 1.0, 1.0), 2, seconds)


def test_the_table_and_the_exit_status_follow_from_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    heard.refusals["chat", 503, True] = 5
    heard.refusals["chat", 500, False] = 1
    seen = [found("worker", 1.0), found("worker", 3.0), found("worker", None), found("api", 2.0)]

    def run(bad: dict[str, int]) -> Chaos:
        chaos = Chaos(Measured(), seen, heard, Audit(9, dict.fromkeys(BAD, 0) | bad, []))
        chaos.measured.rows.extend(chaos_measure._rows(chaos))
        return chaos

    chaos = run({})
    assert table(chaos)[1:3] == [
        ["worker", "3", "0", "0", "1.0 s", "3.0 s", "3.0 s"],
        ["api", "1", "0", "0", "2.0 s", "2.0 s", "2.0 s"],
    ]
    assert table(chaos)[3] == ["engine", "0", "0", "0", "-", "-", "-"]
    assert list(refusals(chaos)) == ["500 without Retry-After (chat)", "503 with Retry-After (chat)"]
    for bad, status in (({}, 0), ({"burnt": 1}, 1)):
        monkeypatch.setattr(chaos_measure, "measure", lambda *_, bad=bad: run(bad))
        ended = CliRunner().invoke(app, ["bench", "chaos", "--json"])
        assert (ended.exit_code, json.loads(ended.stdout)["bad"]["burnt"]) == (status, bad.get("burnt", 0))
        rows = {row["metric"]: row for row in json.loads(ended.stdout)["rows"]}
        assert rows[BAD["burnt"]]["ratio"] == 1 - status


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_short_run_loses_no_job() -> None:
    said: list[str] = []
    steps: list[str] = []
    totals: list[int] = []
    small = ChaosPlan(seconds=10, seed=1, token_seconds=0.02)
    chaos = measure(small, Listener(total=totals.append, step=steps.append, say=said.append))
    assert totals == [len(steps)]
    assert chaos.is_good, "\n".join(said)
    assert chaos.audit.jobs >= len(chaos.heard.accepted) > 0
    assert chaos.disruptions
    told = document(small, chaos)
    assert json.loads(json.dumps(told)) == told
    assert "| worker |" in markdown(told, "reasoner bench chaos")
