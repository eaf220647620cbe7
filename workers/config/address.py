"""The address of the service on this machine, for clients.

They read ``host`` and ``port`` alone: other settings are the server's, with secrets and folders that only it can read.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from workers.config.explain import CONFIG_FILE
from workers.config.types import ConfigError

HOST, PORT = "127.0.0.1", 8000
"""Address of a service that is not configured."""


def find_service_url() -> str:
    """Return the configured address. Raises ``ConfigError``."""
    variables = {name.upper(): value for name, value in os.environ.items()}
    file: dict[str, Any] = {}
    if not {"REASONER_HOST", "REASONER_PORT"} <= variables.keys():
        file = _read_file()
    host = str(variables.get("REASONER_HOST", file.get("host", HOST)))
    port = variables.get("REASONER_PORT", file.get("port", PORT))
    try:
        number = int(port)
    except (TypeError, ValueError):
        number = 0
    if not 1 <= number <= 65535:
        origin = "REASONER_PORT" if "REASONER_PORT" in variables else f"{CONFIG_FILE}: port"
        raise ConfigError(f"{origin}: must be a number from 1 to 65535 (got {port!r}), or give --url")
    return f"http://{reachable_host(host)}:{number}"


def reachable_host(host: str) -> str:
    """Return the host for URLs of a server on this machine that listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _read_file() -> dict[str, Any]:
    try:
        return tomllib.loads(Path(CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{CONFIG_FILE}: {error}; --url needs no file") from None
