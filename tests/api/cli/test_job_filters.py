"""Filters of ``reasoner jobs list``."""

from __future__ import annotations

import time
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.entry.app import app
from api.cli.options import Connection


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the arguments of the client's calls."""
    seen: list[dict[str, Any]] = []

    class FakeClient:
        def __enter__(self) -> FakeClient:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def list(self, **query: Any) -> dict[str, Any]:
            seen.append({name: value for name, value in query.items() if value})
            return {"data": [], "first_id": None, "last_id": None, "has_more": False}

    monkeypatch.setattr(Connection, "connect", lambda _: FakeClient())
    return seen


def test_every_filter_reaches_the_service(queries: list[dict[str, Any]]) -> None:
    options = "--status failed --strategy beam --model m --name heavy --owner ann --metadata a=b=c --metadata d= "
    options += "--created-after 100 --created-before 200.5 --after job_1 --limit 3"
    run = CliRunner().invoke(app, ["jobs", "list", *options.split(), "--search", "two words"])
    assert run.exit_code == 0, run.output
    assert queries == [
        {
            **{"status": "failed", "strategy": "beam", "model": "m", "name": "heavy", "owner": "ann"},
            **{"metadata": {"a": "b=c", "d": ""}, "created_after": 100.0, "created_before": 200.5},
            **{"after": "job_1", "limit": 3, "q": "two words"},
        }
    ]


def test_a_duration_is_a_time_before_now(queries: list[dict[str, Any]]) -> None:
    before = time.time()
    assert CliRunner().invoke(app, ["jobs", "list", "--created-after", "2d"]).exit_code == 0
    assert before - 2 * 86_400 <= queries[0]["created_after"] <= time.time() - 2 * 86_400


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--metadata", "team", "write KEY=VALUE"), ("--created-before", "yesterday", "is not a time")],
)
def test_a_filter_that_cannot_be_read_is_refused(
    queries: list[dict[str, Any]], option: str, value: str, message: str
) -> None:
    run = CliRunner().invoke(app, ["jobs", "list", option, value])
    assert run.exit_code == 2
    assert message in " ".join(run.output.replace("│", " ").split())
    assert queries == []
