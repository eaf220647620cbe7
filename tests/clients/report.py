"""The table of clients: each with its version, what was run with it, and how that ended (docs/reference/clients.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

RESULTS = Path(__file__).parent / "results.json"
MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Row:
    """A client's row. ``result``: ``green``, or the reason why not."""

    name: str
    package: str
    version: str
    runs: str
    result: str


class Report:
    """Collects the rows of a test run. It writes them to ``path``, if there is one, beside the rows of earlier runs."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._rows: dict[str, Row] = {}

    def add(self, report: pytest.TestReport, *, name: str, package: str, runs: str, version: str = "") -> None:
        """Add the result of a client's test.

        ``package``: as pip knows it, or npm behind ``npm:``. ``version``: that of a client that is no package.
        """
        if report.passed:
            result = "green"
        elif report.skipped:
            result = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        else:
            result = next((line for line in report.longreprtext.splitlines() if line.startswith("E ")), "failed")
        earlier = self._rows.get(name)
        if earlier is None or earlier.result == "green":
            self._rows[name] = Row(name, package, version, runs=runs, result=result.strip()[:MAX_REASON_CHARS])

    def write(self, environments: Iterable[Path]) -> None:
        """Write the rows. A client that could not be run here keeps the row of an earlier run."""
        if self._path is None or not self._rows:
            return
        known = {row.name: row for row in read_rows(self._path)}
        versions: dict[str, str] = {}
        for name, version in (package for folder in environments for package in _list_versions(folder)):
            versions.setdefault(name, version)
        for row in self._rows.values():
            if row.result.startswith("Skipped") and row.name in known:
                continue
            version = row.version or versions.get(row.package, "not installed")
            known[row.name] = Row(row.name, row.package, version, runs=row.runs, result=row.result)
        self._path.write_text(json.dumps([asdict(row) for row in known.values()], indent=2) + "\n")


def read_rows(path: Path = RESULTS) -> list[Row]:
    """Return the rows of earlier runs."""
    return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def _list_versions(environment: Path) -> Iterable[tuple[str, str]]:
    """Yield the packages for Python and for Node in a folder, each with its version."""
    folders = [str(folder) for folder in environment.glob("lib/python*/site-packages")]
    yield from ((package.name, package.version) for package in distributions(path=folders))
    for path in [*environment.glob("node_modules/*/package.json"), *environment.glob("node_modules/@*/*/package.json")]:
        package = json.loads(path.read_text())
        yield f"npm:{package['name']}", package.get("version", "")
