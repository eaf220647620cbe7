"""Options that several commands share: aliases of single ones, and dataclasses of those that belong together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from reasoner.client import Client
from workers.config.settings import Settings, load_settings

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
        return Client(self.url or configured_url(load_settings()), self.key)


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
    return load_settings(**{name: value for name, value in overrides.items() if value is not None})


def configured_url(settings: Settings) -> str:
    return f"http://{settings.host}:{settings.port}"
