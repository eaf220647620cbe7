"""Audit the end of every job in the store, without the API."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.clients import Heard
from benchmarks.chaos.fleet import Fleet
from reasoner.budget.usage import Usage
from reasoner.jobs.job import TERMINAL_STATUSES
from workers.store.serialization import usage_of

BAD = {
    "lost": "accepted jobs that the store does not know",
    "twice": "jobs with two ends, and idempotency keys with two jobs",
    "gaps": "journals and streams with an entry missing, or twice",
    "bills": "jobs whose usage is not the sum of their journal",
    "burnt": "healthy jobs that were given up after max_attempts",
    "failed": "jobs that failed or were cancelled otherwise",
    "hanging": "jobs that did not end",
    "refused": "answers other than success and 503 with Retry-After",
}
_RELATIVE = 1e-9
_ALLOWED = frozenset({409, 429})
"""Statuses below 500 that are allowed: the response says when to retry, or the same call is still being processed."""


@dataclass(frozen=True, slots=True)
class Audit:
    """``jobs``: number of all jobs; ``bad``: number of errors by kind in ``BAD``; ``said``: a line for each error."""

    jobs: int
    bad: dict[str, int]
    said: list[str]


def unfinished(fleet: Fleet) -> int:
    """Return the number of jobs that have not ended."""
    return int(fleet.redis.zcard("reasoner:jobs:queued")) + int(fleet.redis.zcard("reasoner:jobs:in_progress"))


def audit(fleet: Fleet, heard: Heard) -> Audit:
    """Check every job and the clients' records once no job is running."""
    bad, said = dict.fromkeys(BAD, 0), []

    def complain(kind: str, text: str, count: int = 1) -> None:
        bad[kind] += count
        said.append(f"{kind}: {text}")

    jobs: list[str] = fleet.redis.zrange("reasoner:jobs", 0, -1)
    for job_id in sorted(heard.accepted - set(jobs)):
        complain("lost", job_id)
    for key, ids in heard.by_key.items():
        if len(ids) > 1:
            complain("twice", f"{key!r} made {', '.join(sorted(ids))}")
    if heard.gaps:
        complain("gaps", "events came in another order than they were numbered", heard.gaps)
    for job_id in jobs:
        for kind, text in check(fleet.redis.hgetall(f"reasoner:job:{job_id}"), fleet.log(job_id)):
            complain(kind, f"{job_id}: {text}")
    for (way, status, says_when), count in sorted(heard.refusals.items()):
        if not (says_when and status == 503) and status not in _ALLOWED:
            complain("refused", f"{status}{' with' if says_when else ' without'} Retry-After ({way})", count)
    return Audit(len(jobs), bad, said)


def check(fields: dict[str, str], log: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the errors of a job, with their kind in ``BAD``. ``fields``: its hash; ``log``: its stream."""
    found: list[tuple[str, str]] = []
    status = fields["status"]
    if status not in TERMINAL_STATUSES:
        found.append(("hanging", status))
    ends = [entry["type"] for entry in log if entry["type"].removeprefix("job.") in TERMINAL_STATUSES]
    if len(ends) > 1 or (ends and log[-1]["type"] != ends[0]):
        found.append(("twice", f"ends are {ends}, the last entry is {log[-1]['type']}"))
    keys = [entry["key"] for entry in log if "key" in entry]
    if [entry["seq"] for entry in log] != [f"{seq}-0" for seq in range(1, len(log) + 1)] or len(set(keys)) < len(keys):
        found.append(("gaps", f"{len(log)} entries, {len(keys)} keys of which {len(set(keys))} differ"))
    journal = sum((Usage.model_validate_json(entry["spend"]) for entry in log if "key" in entry), Usage())
    if not _equal(usage_of(fields), journal):
        found.append(("bills", f"{usage_of(fields)} is not {journal}"))
    if status == "failed":
        error = json.loads(fields["error"])
        found.append(("burnt" if error["code"] == "max_attempts" else "failed", f"{error}"))
    elif status == "cancelled":
        found.append(("failed", "cancelled, and nobody asked for it"))
    return found


def _equal(bill: Usage, journal: Usage) -> bool:
    pairs = zip(bill.model_dump().values(), journal.model_dump().values(), strict=True)
    return all(abs(one - other) <= _RELATIVE * max(1.0, abs(other)) for one, other in pairs)
