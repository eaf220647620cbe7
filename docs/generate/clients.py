"""The reference of the clients that were run against the service, and how that ended."""

from __future__ import annotations

from collections.abc import Sequence

from docs.generate.tables import code, table
from tests.clients.report import Row


def page(rows: Sequence[Row]) -> str:
    """Return the page. ``rows`` are those of the last runs of ``make test-clients`` and ``make test-harnesses``."""
    body = [
        (row.name, f"{code(row.package.removeprefix('npm:'))} {row.version}", row.runs, row.result)
        for row in sorted(rows, key=lambda row: row.name.lower())
    ]
    return (
        "# Clients\n\n"
        "Clients and harnesses that nobody here wrote, unmodified, each with what was run with it. The model behind "
        "the service is one whose answers are known, and the bundled one for a turn whose history it has to read. "
        "`make test-clients` and `make test-harnesses` run them and write this table; where a client is not installed, "
        "its row stays that of the run before. How each is set up: [Use other clients](../how-to/clients.md).\n\n"
        + table(("client", "version", "what was run", "result"), body)
        + "\nThe service has no log-likelihoods of given texts, so that lm-evaluation-harness runs tasks that "
        "generate, not `local-completions` with multiple choice; an [engine](engine.md) has `/v1/score`.\n"
    )
