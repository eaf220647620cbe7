"""Options that several commands share: aliases of single ones, dataclasses of those that belong together, and times."""

from __future__ import annotations

import functools
import inspect
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from reasoner.client import Client
from workers.config.address import find_service_url
from workers.processes.quiet_imports import end_quietly

if TYPE_CHECKING:
    from workers.config.settings import Settings

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")]
Model = Annotated[str | None, typer.Option(help="A bundled model, a model folder, or NAME=FOLDER.")]
PageSize = Annotated[int, typer.Option("--limit", min=1, max=100)]


KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True, slots=True)
class Connection:
    """A running service and the key for it."""

    url: Annotated[
        str | None,
        typer.Option(
            envvar="REASONER_URL", help="Address of a running service; default: the configured port on this machine."
        ),
    ] = None
    key: Annotated[str | None, typer.Option(envvar="REASONER_API_KEY", help="API key, if the service needs one.")] = (
        None
    )

    def connect(self) -> Client:
        """Return a client of the service at ``url``, or on the configured port."""
        return Client(self.url or find_service_url(), self.key)


@dataclass(frozen=True, slots=True)
class ServiceOptions(Connection):
    """A running service, and the form of the output."""

    as_json: AsJson = False


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for typer: each parameter whose type is a dataclass becomes one option for each field."""
    groups: dict[str, type[Any]] = {}
    parameters = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter.replace(annotation=kind, kind=KEYWORD_ONLY))
            continue
        groups[parameter.name] = kind
        kinds = get_type_hints(kind, include_extras=True)
        parameters += [
            parameter.replace(
                name=option.name, annotation=kinds[option.name], default=option.default, kind=KEYWORD_ONLY
            )
            for option in fields(kind)
        ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        built = {
            name: kind(**{option.name: values.pop(option.name) for option in fields(kind)})
            for name, kind in groups.items()
        }
        command(**values, **built)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return run


def load_with(**overrides: object) -> Settings:
    """Load the settings with the options that are given: those that are not ``None``."""
    with end_quietly():
        from workers.config.settings import load_settings  # which clients of a service need not import

    return load_settings(**{name: value for name, value in overrides.items() if value is not None})


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MAX_TIME = 1e11
"""Latest time in seconds since 1970: three thousand years later."""


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration such as 90d, 12h or 30m, or None if the text is no duration."""
    match = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def parse_time(text: str, option: str) -> float:
    """Return the seconds since 1970 for a duration before now, a date, a date with a time, or a number of seconds.

    A date without a time zone is local. Raises ``typer.BadParameter``, which names the option.
    """
    duration = parse_duration(text)
    if duration is not None:
        return max(0.0, time.time() - duration)
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            seconds = -1.0
    if not 0 <= seconds <= MAX_TIME:
        raise typer.BadParameter(
            f"{text!r} is not a time: write 2d (or 90s, 30m, 12h, 1w), 2026-01-31, 2026-01-31T12:00 or "
            "seconds since 1970",
            param_hint=option,
        )
    return seconds
