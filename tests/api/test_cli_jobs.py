"""What ``reasoner solve`` and ``reasoner jobs submit`` send of their options."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from api import cli_jobs
from api.cli import app


class Sent(Exception):
    """Carries the body instead of sending it."""


def sent(monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def submit(self, spec: dict[str, Any]) -> None:
            raise Sent(spec)

    monkeypatch.setattr(cli_jobs, "client_of", lambda url, key: Client())
    result = CliRunner().invoke(app, ["jobs", "submit", "?", *options])
    assert isinstance(result.exception, Sent), result.output
    body: dict[str, Any] = result.exception.args[0]
    return body


def test_a_word_or_json_says_who_verifies_and_how_answers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"kind": "numeric", "expected": 4}
    body = sent(monkeypatch, "--verifier", json.dumps(rule), "--answer", '{"extract": "hash"}')
    assert body["verifier"] == rule
    assert body["answer"] == {"extract": "hash"}
    body = sent(monkeypatch, "--verifier", "judge", "--answer", "text", "--n", "4")
    assert body["verifier"] == {"kind": "judge"}
    assert body["answer"] == "text"
    assert body["strategy"] == {"name": "best_of_n", "n": 4}
    assert "verifier" not in sent(monkeypatch)


def test_what_begins_like_json_and_is_none_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["jobs", "submit", "?", "--verifier", "{kind: numeric}"])
    assert result.exit_code == 2
    assert "--verifier" in result.output
    assert "not JSON" in result.output
