"""``reasoner keys``: on the broker for the first key, then through the service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from api.app.app import create_app
from api.cli import keys
from api.cli.entry.app import app
from api.cli.options import Connection
from reasoner.client import Client, ServiceError
from tests.scripted import ScriptedEngine
from workers.config.settings import load_settings


@pytest.fixture
def reasoner(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that runs a command, beside a service on the same broker."""
    monkeypatch.setenv("REASONER_REDIS_URL", url)
    monkeypatch.setenv("REASONER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    service = create_app(load_settings(), ScriptedEngine())
    with TestClient(service, base_url="http://127.0.0.1") as http:

        def connect(options: Connection) -> Client:
            client = Client("http://127.0.0.1", options.key)
            http.headers["Authorization"] = f"Bearer {options.key}"
            client._http = http
            monkeypatch.setattr(http, "close", lambda: None)
            return client

        monkeypatch.setattr(Connection, "connect", connect)
        yield lambda *words: CliRunner().invoke(app, ["keys", *words])


def document(result: Result) -> Any:
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_the_first_key_is_made_on_the_broker_and_the_others_through_the_service(reasoner: Any) -> None:
    admin = document(reasoner("create", "me", "--scope", "admin", "--direct", "--json"))
    refused = reasoner("list", "--key", "rk_none")
    assert isinstance(refused.exception, ServiceError)
    assert refused.exception.status == 401
    with_key = ("--key", admin["key"])
    made = document(reasoner("create", "notebook", "--owner", "ann", "--expires", "2d", "--json", *with_key))
    assert (made["owner"], made["scopes"]) == ("ann", ["jobs:read", "jobs:write"])
    assert made["expires_at"] - made["created_at"] == pytest.approx(2 * 86_400, abs=0.002)  # written in milliseconds
    through, direct = document(reasoner("list", "--json", *with_key)), document(reasoner("list", "--json", "--direct"))
    assert through == direct
    assert [key["id"] for key in through["data"]] == [made["id"], admin["id"]]
    assert document(reasoner("revoke", made["id"], "--json", *with_key))["revoked_at"] is not None
    assert "revoked" in reasoner("list", "--direct").stdout


def test_a_new_key_is_printed_alone_on_the_last_line(reasoner: Any) -> None:
    shown = reasoner("create", "a[b]c", "--direct").stdout
    key = shown.splitlines()[-1]
    assert "a[b]c" in shown
    assert key.startswith("rk_")
    assert key not in reasoner("list", "--direct").stdout
    refused = reasoner("list", "--key", key)
    assert isinstance(refused.exception, ServiceError)
    assert "needs admin" in str(refused.exception)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("create", "x", "--scope", "all", "--direct"), "'jobs:read'"),
        (("create", "x", "--expires", "soon", "--direct"), "s, m, h, d or w"),
        (("create", "x", "--owner", "a b", "--direct"), "owner"),
        (("create", "--direct"), "Missing argument"),
    ],
)
def test_wrong_usage_is_explained(reasoner: Any, words: tuple[str, ...], hint: str) -> None:
    result = reasoner(*words)
    assert result.exit_code == 2
    assert hint in result.output


def test_a_key_id_is_not_truncated_on_a_narrow_terminal(reasoner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = document(reasoner("create", "a name of some length", "--direct", "--json"))
    monkeypatch.setattr(keys, "_out", Console(width=60))
    assert made["id"] in reasoner("list", "--direct").stdout


def test_an_unknown_key_cannot_be_revoked(reasoner: Any) -> None:
    for direct in (("--direct",), ()):
        result = reasoner("revoke", "key_" + "0" * 16, *direct)
        assert isinstance(result.exception, ServiceError)
        assert "there is no key" in str(result.exception)
