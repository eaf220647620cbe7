"""Write a run's result as a JSON document and a Markdown page."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from benchmarks.chaos.measure import Chaos, ChaosPlan, refusals, table
from benchmarks.engine.report import machine

_METHOD = (
    "Two APIs, workers, the engine with its models and the broker are processes of their own; clients keep jobs of ten "
    "strategies in hand, with and without an Idempotency-Key, waiting, polling and following events. One process after "
    "the other, all roles equally often, is killed (SIGKILL), terminated (SIGTERM), or frozen for up to five seconds "
    "(SIGSTOP), and started again half a second later. A recovery is the time from the blow until every job that "
    "needed the process has a new entry in its journal, or has ended; an API's, until it answers again. Then all jobs "
    "have two minutes to end, and every one is looked at in the store. Refusals with 409 or 429 are no complaint."
)


def document(plan: ChaosPlan, chaos: Chaos) -> dict[str, Any]:
    """Return the contract's document, with the settings, the disruptions and the refusals beside it."""
    measured = chaos.measured
    return {
        "machine": machine(os.cpu_count() or 1, measured),
        "rows": [asdict(row) for row in measured.rows],
        "settings": asdict(plan),
        "jobs": chaos.audit.jobs,
        "bad": chaos.audit.bad,
        "refusals": refusals(chaos),
        "broken_connections": chaos.heard.broken,
        "disruptions": [asdict(found) for found in chaos.disruptions],
        "complaints": chaos.audit.said,
        "runs": measured.runs,
        "table": table(chaos),
    }


def markdown(document: dict[str, Any], command: str) -> str:
    """Return the page ``table.md``."""
    about = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(about["versions"].items()))
    head, *lines = document["table"]
    text = [
        f"`{command}`",
        "",
        f"{about['processor']}, {about['cores']} cores. Python {about['python']}, {versions}.",
        "",
        f"{_METHOD} Seed {document['settings']['seed']}, {document['settings']['seconds']:g} seconds, "
        f"{document['jobs']} jobs, {len(document['disruptions'])} disruptions.",
        "",
        "| " + " | ".join(head) + " |",
        "|---|" + "---:|" * (len(head) - 1),
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
        "| what must not happen | count |",
        "|---|---:|",
        *(f"| {row['metric']} | {row['ours']:g} |" for row in document["rows"] if row["case"] == "jobs"),
        "",
        "| refused | times |",
        "|---|---:|",
        *(f"| {kind} | {count} |" for kind, count in document["refusals"].items()),
    ]
    return "\n".join([*text, ""])
