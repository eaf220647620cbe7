"""Messages for invalid settings: which source they come from, and what would be valid."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_settings import SettingsError

CONFIG_FILE = "reasoner.toml"
_SECRETS = (
    "api_keys",
    "archive_url",
    "engine_api_key",
    "prm_api_key",
    "redis_url",
    "webhook_secret",
    "webhook_secrets",
)
_MOVED = {"prices": "the prices of a model belong to it: write [models.NAME.prices]"}
"""Settings of earlier versions, with what to write instead."""


def describe_origin(name: str, overrides: dict[str, Any]) -> str:
    """Return the command-line option, the environment variable or the key of the file that a setting comes from."""
    if name in overrides:
        return f"--{name.removeprefix('engine_').replace('_', '-')}"
    variable = f"REASONER_{name.upper()}"
    return variable if variable in os.environ else f"{CONFIG_FILE}: {name}"


def find_moved_variable() -> str | None:
    """Return the message for an environment variable of an earlier version, which would otherwise be ignored."""
    given = (name for name in _MOVED if f"REASONER_{name.upper()}" in os.environ)
    return next((f"REASONER_{name.upper()}: {_MOVED[name]} into {CONFIG_FILE}" for name in given), None)


def explain_unreadable(error: SettingsError) -> str:
    """Return the message for a setting that its source has not in the form of its type."""
    match = re.search(r'value for field "(\w+)" from source "EnvSettingsSource"', str(error))
    if match is None:
        return f"{CONFIG_FILE}: {error}"
    return f"REASONER_{match[1].upper()}: it is a table, so give a JSON object ({error.__cause__})"


def explain(error: Any, name: str, settings: type[BaseModel]) -> str:
    """Return the message for one of Pydantic's errors about the setting ``name``."""
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1 and name in _MOVED:
        return _MOVED[name]
    return explain_field(error, settings, shows_value=name not in _SECRETS)


def explain_field(error: Any, model: type[BaseModel], *, shows_value: bool = True) -> str:
    """Return the message for one of Pydantic's errors about a field of ``model``, or of a table in it."""
    if error["type"] == "extra_forbidden":
        table = _find_table(model, error["loc"][:-1])
        known = "" if table is None else f"; known settings: {', '.join(sorted(table.model_fields))}"
        return f"unknown setting {error['loc'][-1]!r}{known}"
    message: str = error["msg"]
    return message.removeprefix("Value error, ") + (f" (got {error['input']!r})" if shows_value else "")


def _find_table(model: type[BaseModel], path: Sequence[Any]) -> type[BaseModel] | None:
    """Return the model of the table at ``path``; ``None`` if it is one of several kinds."""
    parts = iter(path)
    for part in parts:
        if part not in model.model_fields:
            if model.model_config.get("extra") == "allow":  # the name of an entry, with the same fields
                continue
            return None
        kind: Any = model.model_fields[part].annotation
        if get_origin(kind) is dict:
            next(parts, None)  # the name of the entry
            kind = get_args(kind)[1]
        tables = [kind for kind in (kind, *get_args(kind)) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if len(tables) != 1:
            return None
        model = tables[0]
    return model
