"""Report of the service benchmark: the JSON document and the Markdown page."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.measure import Measured
from benchmarks.engine.report import machine
from benchmarks.service.fairness import WEIGHTS, draw_sharing
from benchmarks.service.interference import InterferencePlan
from benchmarks.service.measure import ServicePlan
from benchmarks.service.on_engine import EnginePlan

_METHOD = (
    "The engine has no model: it answers by a hash and sleeps for what a token takes, nothing in `submit` and in the "
    "short jobs. `Celery alone` is what one would write without this service (benchmarks/service/plain.py): the whole "
    "job as a Celery message, the same search in the task, its answer in Redis, and no journal, lease, event or bill; "
    "it has the same broker and engine and as many threads. `broker` is what Redis reads from sockets (a pipeline is "
    "one request), sends and receives, and keeps for each job, and its seconds of a core. A batch of jobs is one "
    "request, while no worker takes them. Jobs `in the queue` are stored at once by the script of a submission, and "
    "neither API nor client works while the worker processes take them. Both have one API process and one worker, and "
    "take turns. Latencies are those of all rounds together, as one client sees them while the worker works; jobs per "
    "second are from the first submission to the last end on the broker's clock, the median of the rounds. "
    "`overhead_fraction` is the median time from submission to result over the median time of the same search in one "
    "process without a broker, less one; both ways ask the engine for the same branches and scores and find the same. "
    "`errors` counts refused submissions, streams that broke or have gaps, jobs that did not complete and errors in "
    "the logs, while all jobs wait, all streams are open, and then one worker comes and does them. In `crowd` one "
    "worker runs many searches at once, whose heartbeats and writes are looked at four times a second, and is then "
    "asked to stop: `handed back` are those that wait again with no attempt used up. Memory is the proportional set "
    "size. A ratio above 1 means that we are ahead."
)
_FAIRNESS = (
    " In the case of `fairness` one owner's jobs wait when a worker comes; 200 of them later two other owners submit, "
    "with weights of 2 and 4 to its 1. A start is a worker's claim, by the broker's clock; shares are of all starts "
    "from then on until one of the two has no job left that waits."
)


_METHOD_ON_ENGINE = (
    "Bundled models, problems of Countdown, temperature 1. `best of 16`: jobs with 16 samples and a vote, one at a "
    "time, beside one request of httpx for 16 samples (`n`). `beam`: searches with 16 beams and the PRM, in-process, "
    "beside a script that sends the same requests, each as soon as those have ended that had ended before it; both "
    "begin with an empty prefix cache. `reuse`: by vLLM's metrics, beside a cache that loses nothing and keeps whole "
    "blocks. `verifier`: beside the same searches on our engine. Both ways take turns; medians of the rounds. A ratio "
    "below 1 is the price of the service."
)


_METHOD_INTERFERENCE = (
    "The protocol of llm-d's batch gateway at the size of one machine: interactive requests arrive at random times and "
    "stream a greedy answer of few tokens, while a batch of searches runs that takes the given fraction of the window "
    "by itself. `beside a batch`: its jobs are like the interactive ones. `beside a batch that yields`: they are of "
    "the batch queue, with a worker of its own, and pause on the engine. A ratio below 1 is the price of the batch: "
    "1 / 1.3 = 0.77 at p99 is the goal, with 99 % of the batch in its window."
)


def document(plan: ServicePlan | EnginePlan | InterferencePlan, measured: Measured) -> dict[str, Any]:
    """Return the document of results, with the settings and every single run."""
    settings = {name: value for name, value in asdict(plan).items() if name not in ("settings", "engine")}
    return {
        "method": _METHODS[type(plan)],
        "machine": machine(os.cpu_count() or 1, measured),
        "rows": [asdict(row) for row in measured.rows],
        "settings": settings | {"cases": list(plan.cases)},
        "runs": measured.runs,
    }


_METHODS = {ServicePlan: _METHOD + _FAIRNESS, EnginePlan: _METHOD_ON_ENGINE, InterferencePlan: _METHOD_INTERFERENCE}


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the starts of the case ``fairness``, if it was run."""
    backlog = document["settings"].get("backlog")
    for case, runs in document["runs"].items():
        if backlog is not None and case.startswith(f"{backlog} ") and runs.keys() == WEIGHTS.keys():
            draw_sharing(runs, path)


def markdown(document: dict[str, Any], command: str) -> str:
    """Return the page ``table.md``."""
    about = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    lines = [
        f"`{command}`",
        "",
        f"{about['processor']}, {about['cores']} cores. Python {about['python']}, {versions}.",
        "",
        f"{document['method']} Rounds: {document['settings']['rounds']}.",
        "",
        "| case | metric | unit | ours | beside | its value | ratio |",
        "|---|---|---|---:|---|---:|---:|",
    ]
    for row in document["rows"]:
        ours, value = (f"{row[name]:.3g}" for name in ("ours", "peer_value"))
        cells = (row["case"], row["metric"], row["unit"], ours, row["peer"], value, f"{row['ratio']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])
