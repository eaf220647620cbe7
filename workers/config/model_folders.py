"""Checks of the configured model folders before a role starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.gguf.template_setting import PLAIN, read_template
from engine.protocol.types import EngineError
from prm.formats.registry import FormatName
from reasoner.admission.model_checks import check_policy, check_prm, is_language_model
from reasoner.jobs.verifier_specs import PrmVerifier
from workers.config.settings import Settings
from workers.config.types import ConfigError, find_model_folder


def check_models(settings: Settings) -> None:
    """Raise ``ConfigError`` for a policy or a PRM with which all jobs would fail.

    Models on other machines are checked by ``/readyz``.
    """
    verifiers = _find_verifiers(settings)
    folders = [("engine_tokenizer", settings.model_name, _expand_path(settings.engine_tokenizer))]
    if settings.prm_name is not None:
        folders.append(("prm_tokenizer", settings.prm_name, _expand_path(settings.prm_tokenizer)))
    for name, (setting, value) in settings.local_models().items():
        folders.append((setting, name, find_model_folder(value)))
    for setting, name, folder in folders:
        if folder is None:
            continue
        with _name_setting(f"models.{name}.chat_template"):
            template = _read_template(settings, name)
        with _name_setting(setting):
            if name in verifiers:
                check_prm(folder, name, verifiers[name], template)
            elif name == settings.model_name or is_language_model(folder):
                check_policy(folder, template)


def _find_verifiers(settings: Settings) -> dict[str, FormatName | None]:
    """Return the process reward models that policies have by default, with their configured formats."""
    specs = [settings.default_verifier(name) for name in (settings.model_name, *settings.models)]
    names = {spec.model for spec in specs if isinstance(spec, PrmVerifier) and spec.model is not None}
    formats = {name: profile.prm_format for name, profile in settings.models.items()}
    if settings.prm_name is not None and settings.prm_format is not None:
        formats[settings.prm_name] = settings.prm_format
    return {name: formats.get(name) for name in names}


def _read_template(settings: Settings, name: str) -> str | None:
    """Return the chat template that a model has in the settings. Raises ``EngineError`` for an unusable one."""
    profile = settings.models.get(name)
    value = None if profile is None else profile.chat_template
    if value is None:
        return None
    from engine.gguf.template_check import check_template  # takes a while to import

    template = read_template(value)
    if value != PLAIN:
        check_template(template, "it")
    return template


def _expand_path(folder: Path | None) -> Path | None:
    return None if folder is None else folder.expanduser().absolute()


@contextlib.contextmanager
def _name_setting(setting: str) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise ConfigError(f"{setting}: {error}") from None
