"""Messages for invalid settings: which source they come from, and what would be valid."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel

from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.effort import Effort
from reasoner.budget.prices import Prices
from workers.config.rate_limits import Limits

CONFIG_FILE = "reasoner.toml"
_SECRETS = ("api_keys", "redis_url", "webhook_secret", "webhook_secrets")
_TABLES: dict[str, type[BaseModel]] = {"prices": Prices, "effort": Effort, "models": ModelDefaults, "limits": Limits}
"""Types of the entries of tables by model, by effort or by owner."""


def describe_origin(name: str, overrides: dict[str, Any]) -> str:
    """Return the command-line option, the environment variable or the key of the file that a setting comes from."""
    if name in overrides:
        return f"--{name.removeprefix('engine_').replace('_', '-')}"
    variable = f"REASONER_{name.upper()}"
    return variable if variable in os.environ else f"{CONFIG_FILE}: {name}"


def explain(error: Any, name: str, settings: type[BaseModel]) -> str:
    """Return the message for one of Pydantic's errors about the setting ``name``."""
    if error["type"] == "extra_forbidden":
        table: Any = _TABLES[name] if len(error["loc"]) > 1 else settings
        for part in error["loc"][2:-1]:  # without the names of the table and of its entry
            table = table.model_fields[part].annotation
        return f"unknown setting {error['loc'][-1]!r}; known settings: {', '.join(sorted(table.model_fields))}"
    message: str = error["msg"]
    value = "" if name in _SECRETS else f" (got {error['input']!r})"
    return message.removeprefix("Value error, ") + value
