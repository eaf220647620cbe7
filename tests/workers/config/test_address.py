"""The address that clients of a service on this machine use, without the settings of the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import mostly_long
from workers.config.address import find_service_url
from workers.config.settings import load_settings
from workers.config.types import ConfigError


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("REASONER_HOST", "REASONER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("file", "environment", "url"),
    [
        ("", {}, "http://127.0.0.1:8000"),
        ("port = 81\n", {}, "http://127.0.0.1:81"),
        ("port = 81\n", {"REASONER_PORT": "82"}, "http://127.0.0.1:82"),
        ('host = "::"\n', {}, "http://[::1]:8000"),
        ("", {"REASONER_HOST": "0.0.0.0", "reasoner_port": "83"}, "http://127.0.0.1:83"),
        ('host = "10.1.2.3"\n[limits]\nx = 1\n', {}, "http://10.1.2.3:8000"),
    ],
)
def test_the_address_is_that_of_the_servers_settings(
    file: str, environment: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("reasoner.toml").write_text(file)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_service_url() == url
    if "limits" not in file:
        settings = load_settings()
        assert url.endswith(f":{settings.port}")


@pytest.mark.parametrize("port", ["0", "70000", "http", ""])
def test_an_invalid_port_is_named(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REASONER_PORT", port)
    with pytest.raises(ConfigError, match="REASONER_PORT: must be a number from 1 to 65535"):
        find_service_url()


def test_a_file_that_is_not_toml_is_named() -> None:
    Path("reasoner.toml").write_text("port: 8000")
    with pytest.raises(ConfigError, match=r"reasoner\.toml: .*--url needs no file"):
        find_service_url()


@pytest.mark.parametrize(
    "command",
    mostly_long(
        [
            ["jobs", "list"],
            ["jobs", "show", "job_1"],
            ["models"],
            ["keys", "list"],
            ["batch", "list"],
            ["solve", "1 + 1?"],
            ["select", "candidates.jsonl"],
        ],
        every=3,
    ),
)
def test_commands_of_a_client_need_no_settings_of_the_server(command: list[str]) -> None:
    Path("candidates.jsonl").write_text('{"problem": "1 + 1?", "candidates": ["2", "3"]}\n')
    Path("reasoner.toml").write_text(
        'model = "/nowhere"\nwebhook_secret = "short"\napi_keys = "x"\n[engines.far]\napi_key_file = "/root/no-key"\n'
    )
    words = [sys.executable, "-m", "api.cli.main", *command, "--url", "http://127.0.0.1:9"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=_environment())
    assert "no service answers at http://127.0.0.1:9" in done.stderr, done.stderr
    assert done.returncode == 1


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "REASONER_PRM_API_KEY": "without a prm"}
