"""Settings for the options of an engine."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from pydantic import Field

from engine.protocol.options import EngineOptions

ENGINE_OPTIONS: Final = {option.name: option for option in fields(EngineOptions)}


def engine_option(name: str, default: Any = None) -> Any:
    """Return the setting of an option of the engine: its help and bounds. ``None`` leaves it to the engine."""
    option = ENGINE_OPTIONS[name]
    description = option.metadata["help"]
    if option.default is not None and option.default is not False:
        description += f"; {option.default} by default"
    bounds = {bound: limit for bound, limit in option.metadata.items() if bound in ("ge", "gt", "le")}
    return Field(default, description=f"{description}.", **bounds)
