"""Checks of the configured model folders before a role starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.protocol.types import EngineError
from reasoner.admission.model_checks import check_policy, check_prm
from workers.config.settings import Settings
from workers.config.types import ConfigError, find_model_folder


def check_models(settings: Settings) -> None:
    """Raise ``ConfigError`` for a policy or a PRM with which all jobs would fail.

    Models on other machines are checked by ``/readyz``.
    """
    for setting, folder in (
        ("model", find_model_folder(settings.model)),
        ("engine_tokenizer", _expanded(settings.engine_tokenizer)),
    ):
        if folder is not None:
            with _named(setting):
                check_policy(folder)
    if settings.verifier is None or settings.prm_name is None:
        return
    for setting, folder in (
        ("prm", find_model_folder(settings.verifier)),
        ("prm_tokenizer", _expanded(settings.prm_tokenizer)),
    ):
        if folder is not None:
            with _named(setting):
                check_prm(folder, settings.prm_name, settings.prm_format)


def _expanded(folder: Path | None) -> Path | None:
    return None if folder is None else folder.expanduser().absolute()


@contextlib.contextmanager
def _named(setting: str) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise ConfigError(f"{setting}: {error}") from None
