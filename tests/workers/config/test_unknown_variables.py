"""Misspelt settings of the environment are named at the start of a service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.config.settings import Settings
from workers.config.unknown_variables import describe_unknown_variables


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.upper().startswith("REASONER_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("REASONER_MODLE", "did you mean REASONER_MODEL?"),
        ("REASONER_ENGINE_THREAD", "did you mean REASONER_ENGINE_THREADS?"),
        ("REASONER_REDISURL", "did you mean REASONER_REDIS_URL?"),
        ("reasoner_budget_token", "did you mean REASONER_BUDGET_TOKENS?"),
        ("REASONER_APIKEYS", "did you mean REASONER_API_KEYS?"),
        ("REASONER_XYZZY", "'reasoner' has no such setting"),
    ],
)
def test_an_unknown_variable_is_named_with_what_it_resembles(
    variable: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "a secret value")
    [line] = describe_unknown_variables()
    assert variable in line
    assert hint in line
    assert "secret" not in line


def test_settings_client_variables_and_those_of_others_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("reasoner.toml").write_text('[engines.far]\napi_key_env = "REASONER_FAR_KEY"\n')
    others = ["REASONER_SERVICE_HOST", "REASONER_API_SERVICE_PORT_HTTP", "REASONER_PORT_8000_TCP_ADDR", "REASONERX"]
    known = [f"REASONER_{name.upper()}" for name in Settings.model_fields]
    for variable in (*known, "reasoner_model", "REASONER_URL", "REASONER_API_KEY", "REASONER_FAR_KEY", *others):
        monkeypatch.setenv(variable, "x")
    assert describe_unknown_variables() == []
