"""Owners who share a queue: one has a long backlog when the others come. First starts, and shares of all starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from benchmarks.engine.process import BenchError
from benchmarks.service.deployment import OURS, Deployment
from benchmarks.service.load import submit_all
from reasoner.evaluation.chart import COLOURS
from workers.config.rate_limits import LimitsTable
from workers.store.jobs import new_id
from workers.store.redis_client import read_scripts

WEIGHTS: Final = {"one": 1, "two": 2, "four": 4}
"""The weights of the owners; the first one has the backlog."""
LIMITS: Final = LimitsTable.model_validate({owner: {"weight": weight} for owner, weight in WEIGHTS.items()})
FIRST_START_TARGET: Final = 2.0
DEVIATION_TARGET: Final = 0.05
_BEFORE = 200
"""Jobs of the backlog that start before the others come."""
_PIPELINED = 500
_NO_CAP = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Sharing:
    """``starts``: seconds from the submission of the others' jobs to each start, by owner, in order; those of jobs that
    started before are negative.
    """

    starts: Mapping[str, Sequence[float]]

    @property
    def first_start(self) -> float:
        """Seconds until each of the owners who came has a first job that has started."""
        return max(times[0] for owner, times in self.starts.items() if owner != next(iter(WEIGHTS)))

    @property
    def deviation(self) -> float:
        """The largest relative difference of an owner's share from its weight's, while all have jobs that wait."""
        end = min(times[-1] for owner, times in self.starts.items() if owner != next(iter(WEIGHTS)))
        counts = {owner: sum(0 < time <= end for time in times) for owner, times in self.starts.items()}
        total, weights = sum(counts.values()), sum(WEIGHTS.values())
        return max(abs(count / total * weights / WEIGHTS[owner] - 1) for owner, count in counts.items())


def share_queue(deployment: Deployment, spec: dict[str, object], backlog: int, rounds: int) -> Sharing:
    """Queue a backlog of one owner, start a worker, then add jobs of the others, ``rounds`` for each unit of weight."""
    deployment.start(OURS, "api")
    body = store_example(deployment, spec)
    first, *others = WEIGHTS
    ids = {first: queue_jobs(deployment, first, body, backlog)}
    deployment.start(OURS, "worker")
    deployment.until(lambda: _count_ready(deployment, first) <= backlog - _BEFORE, "the backlog's first jobs start")
    for owner in others:
        ids[owner] = queue_jobs(deployment, owner, body, rounds * WEIGHTS[owner])
    came = float(deployment.redis.hget(f"reasoner:job:{ids[others[0]][0]}", "created") or 0)
    deployment.until(
        lambda: not all(_count_ready(deployment, owner) for owner in others), "an owner has no job left that waits"
    )
    return Sharing({owner: _read_starts(deployment, ids[owner], came) for owner in WEIGHTS})


def store_example(deployment: Deployment, spec: dict[str, object]) -> str:
    """Submit a job and cancel it. Return its spec as the API stores it, for ``queue_jobs``."""
    url = deployment.url(OURS)
    (example,) = asyncio.run(submit_all(url, spec, 1))
    httpx.post(f"{url}/v1/jobs/{example}/cancel", trust_env=False).raise_for_status()
    return str(deployment.redis.hget(f"reasoner:job:{example}", "spec"))


def queue_jobs(deployment: Deployment, owner: str, body: str, count: int) -> list[str]:
    """Store jobs by the script of a submission, as the API does. Return their ids."""
    submit = deployment.redis.register_script(read_scripts()["submit"])
    ids = [new_id("job") for _ in range(count)]
    for start in range(0, count, _PIPELINED):
        pipe = deployment.redis.pipeline(transaction=False)
        for job_id in ids[start : start + _PIPELINED]:
            submit(args=[job_id, body, "interactive", owner, "", _NO_CAP, "", "", "", ""], client=pipe)
        refused = {answer[0] for answer in pipe.execute()} - {"created"}
        if refused:
            raise BenchError(f"jobs were not stored: {refused}")
    return ids


def _count_ready(deployment: Deployment, owner: str) -> int:
    return int(deployment.redis.zcard(f"reasoner:ready:interactive:{owner}"))


def _read_starts(deployment: Deployment, ids: Sequence[str], came: float) -> list[float]:
    pipe = deployment.redis.pipeline(transaction=False)
    for job_id in ids:
        pipe.hget(f"reasoner:job:{job_id}", "started")
    return sorted(float(started) - came for started in pipe.execute() if started is not None)


def draw_sharing(starts: Mapping[str, Sequence[float]], path: Path) -> None:
    """Write a PNG of the starts of each owner over time, beside what their weights say."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    first = next(iter(WEIGHTS))
    end = min(times[-1] for owner, times in starts.items() if owner != first)
    total = sum(0 < time <= end for times in starts.values() for time in times)
    for (owner, times), colour in zip(starts.items(), COLOURS, strict=False):
        weight = WEIGHTS[owner]
        before = sum(time <= 0 for time in times)
        shown = [time for time in times if time <= end]
        label = f"weight {weight}" + (", has the backlog" if owner == first else "")
        axes.step(shown, range(1, len(shown) + 1), where="post", color=colour, lw=1.6, label=label)
        expected = before + total * weight / sum(WEIGHTS.values())
        axes.plot([0, end], [before, expected], color=colour, lw=0.9, linestyle="--")
    axes.axvline(0, color="black", lw=0.8, linestyle=":")
    axes.set_xlabel("seconds since the two other owners came")
    axes.set_ylabel("jobs started")
    axes.legend(title="dashed: the share of the weight", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
