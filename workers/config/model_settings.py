"""Settings of models: which are served, where, and with which defaults for jobs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode

from prm.formats.registry import FormatName
from reasoner.base_model import VerifierSpec
from reasoner.budget.price_catalogue import NotInCatalogue, describe_source, find_prices
from reasoner.budget.prices import Prices
from reasoner.jobs.verifier_specs import LanguageModelVerifier, OutcomeVerifier, PrmVerifier
from workers.config.engine_profiles import EngineProfile
from workers.config.model_profiles import ModelProfile, read_model_file
from workers.config.types import BUNDLED_PRM, ConfigError, check_url, is_bundled, resolve_model_path, served_name

DEFAULT_ENGINE_URL = "http://127.0.0.1:8100"
NO_PRM: Final = "none"


class ModelSettings(BaseSettings):
    """The models of a service. A ``value`` is in the form of ``model``."""

    engine_url: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="The URLs of running, interchangeable engines; without any, an engine on this machine is used."
    )
    engine_tokenizer: Path | None = Field(
        None,
        description="The folder of the model behind engine_url, if its servers take no token ids or cannot tokenise.",
    )
    engine_api_key: SecretStr | None = Field(
        None, description="The API key of the servers at engine_url, if they ask for one."
    )
    model: str = Field(
        "policy",
        description="The policy of jobs that name none: a bundled model, a model folder, a GGUF file, NAME=PATH, or a "
        "name of [models.NAME].",
    )
    prm: str | None = Field(
        None,
        description="The verifier: a bundled model, a model folder, NAME=FOLDER, a name of [models.NAME], or none; by "
        "default the one that the model names, for a bundled model the bundled one, else none.",
    )
    prm_url: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="The URLs of interchangeable servers of the verifier, like engine_url."
    )
    prm_tokenizer: Path | None = Field(
        None, description="The folder of the model behind prm_url (config and tokenizer), if its server is not ours."
    )
    prm_api_key: SecretStr | None = Field(
        None, description="The API key of the servers at prm_url, like engine_api_key."
    )
    prm_format: FormatName | None = Field(
        None, description="The format in which the verifier reads steps, if its checkpoint does not determine it."
    )
    engines: dict[str, EngineProfile] = Field(
        default_factory=dict, description="The servers by any name: where each is, and the models that it serves."
    )
    models: dict[str, ModelProfile] = Field(
        default_factory=dict, description="The models by name: where each is, and the settings that it brings."
    )

    @field_validator("engine_url", "prm_url")
    @classmethod
    def _check_servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a server twice")
        return tuple(check_url(url, ("http://", "https://", "unix://")) for url in value)

    @property
    def model_name(self) -> str:
        """The name of the policy in jobs and at the engine."""
        return self._resolve_name(self.model)

    @property
    def prm_name(self) -> str | None:
        """The name of the default policy's process reward model; ``None`` if it has none."""
        verifier = self.default_verifier(self.model_name)
        return verifier.model if isinstance(verifier, PrmVerifier) else None

    @property
    def verifier(self) -> str | None:
        """The value of the default policy's process reward model; ``None`` if it has none."""
        name = self.prm_name
        return None if name is None else self._find_value(name)

    @property
    def prices(self) -> dict[str, Prices]:
        """The prices of the models that have some: their own, else those of their server's provider."""
        own = {name: profile.prices for name, profile in self.models.items() if profile.prices is not None}
        return own | {
            model: find_prices(engine.prices, model)
            for engine in self.engines.values()
            for model in engine.models
            if engine.prices is not None and model not in own
        }

    @property
    def price_sources(self) -> dict[str, str]:
        """The origin of the prices, by the name of each model that has some."""
        listed = {
            model: describe_source(engine.prices)
            for engine in self.engines.values()
            for model in engine.models
            if engine.prices is not None
        }
        own = {name: f"[models.{name}.prices]" for name, profile in self.models.items() if profile.prices is not None}
        return listed | own

    def default_verifier(self, model: str) -> VerifierSpec | None:
        """Return the verifier of jobs of a model that name none.

        It is the one that the model's settings name, else ``prm``, which takes precedence for the default policy, else
        the bundled one for the bundled policies, on whose solutions it was trained.
        """
        profile = self.models.get(model)
        is_named = profile is not None and "verifier" in profile.list_given()
        if profile is not None and is_named and (self.prm is None or model != self.model_name):
            return profile.verifier
        prm = self.prm
        if prm is None:
            prm = BUNDLED_PRM if self.is_bundled(model) else NO_PRM
        return None if prm == NO_PRM else PrmVerifier(model=self._resolve_name(prm))

    def require_prm(self, what: str) -> str:
        """Return ``prm_name``. Raises ``ConfigError`` if there is none; ``what`` is the subject of its message."""
        if self.prm_name is None:
            raise ConfigError(f"{what} needs a verifier, and none is configured; set REASONER_PRM")
        return self.prm_name

    def local_models(self) -> dict[str, tuple[str, str]]:
        """Return the setting and the value of each model that an engine of this machine loads, by name."""
        elsewhere = {name for name, profile in self.models.items() if profile.url} | self.remote_models().keys()
        if self.prm_url and self.prm_name is not None:
            elsewhere.add(self.prm_name)
        found = {self.model_name: ("model", self._find_value(self.model_name))}
        if self.verifier is not None and self.prm_name is not None:
            found.setdefault(self.prm_name, ("prm", self.verifier))
        for name, profile in self.models.items():
            if profile.path is not None:
                found.setdefault(name, (f"models.{name}.path", profile.path))
        for name in [*found, *self.models]:
            verifier = self.default_verifier(name)
            if isinstance(verifier, PrmVerifier) and is_bundled(verifier.model or ""):
                found.setdefault(str(verifier.model), (f"models.{name}.verifier", str(verifier.model)))
        return {name: place for name, place in found.items() if name not in elsewhere}

    @property
    def has_local_engine(self) -> bool:
        """True if an engine of this machine loads models."""
        return not self.engine_url and bool(self.local_models())

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """The URLs of the configured engines, or that of ``reasoner engine`` on this machine.

        Empty if all models have servers of their own.
        """
        return self.engine_url or ((DEFAULT_ENGINE_URL,) if self.local_models() else ())

    def chat_template_options(self, names: Iterable[str]) -> list[str]:
        """Return the engine's command-line options for the models that have a chat template in the settings."""
        given = {name: self.models[name].chat_template for name in names if name in self.models}
        return [part for name, value in given.items() if value for part in ("--chat-template", f"{name}={value}")]

    def adapter_folders(self) -> dict[str, Path]:
        """Return the folder of each adapter that an engine of this machine loads, by name. Raises ``ConfigError``."""
        folders: dict[str, Path] = {}
        for name, profile in self.models.items():
            if profile.adapter is None:
                continue
            setting, folders[name] = f"models.{name}.adapter", profile.adapter.expanduser().absolute()
            if self.model_name not in self.local_models():
                raise ConfigError(
                    f"{setting}: it adapts a model that our engine loads here, and {self.model_name!r} is served "
                    "elsewhere: give the adapter to its server"
                )
            if not (folders[name] / "adapter_config.json").is_file():
                raise ConfigError(
                    f"{setting}: {profile.adapter} is no folder of an adapter, which has adapter_config.json and "
                    "adapter_model.safetensors"
                )
        return folders

    def remote_models(self) -> dict[str, str]:
        """Return the names of the models that servers in [engines] have, each with the server's name."""
        return {model: name for name, engine in self.engines.items() for model in engine.models}

    def is_bundled(self, model: str) -> bool:
        """Return True for a bundled model, under whatever name it is served."""
        return is_bundled(self._find_value(model))

    def with_model_files(self, more: Iterable[str] = ()) -> Self:
        """Return the settings with those in the files beside the models, and beside ``more`` models by their values.

        Raises ``ConfigError`` for an invalid file.
        """
        models = dict(self.models)
        for value in more:
            defaults = read_model_file(value)
            if defaults is not None and value not in models:
                models[served_name(value)] = ModelProfile().merge(defaults)
        for name in {self.model_name, *self.models, *([] if self.prm_name is None else [self.prm_name])}:
            defaults = read_model_file(self._find_value(name))
            if defaults is not None:
                models[name] = ModelProfile().merge(defaults).merge(models.get(name, ModelProfile()))
        return super().model_copy(update={"models": models})

    def with_bundled(self, names: Iterable[str]) -> Self:
        """Return the settings with those of the names that are bundled models as further models of the engine."""
        missing = [name for name in names if is_bundled(name) and name not in self.local_models()]
        profiles = {name: ModelProfile(path=name) for name in missing}
        return super().model_copy(update={"models": {**self.models, **profiles}})

    def check_endpoints(self) -> None:
        """Raise ``ConfigError`` for a model with two places, a missing API key, and a verifier that is not served."""
        places: dict[str, ModelProfile | EngineProfile] = {f"models.{name}": each for name, each in self.models.items()}
        for where, each in (places | {f"engines.{name}": each for name, each in self.engines.items()}).items():
            try:
                each.read_api_key()
            except ConfigError as error:
                raise ConfigError(f"{where}.{error}") from None
        self._check_engines()
        self._check_templates()
        profile = self.models.get(self.model_name)
        if profile is not None and self.model != self.model_name and (profile.path is not None or profile.url):
            raise ConfigError(f"model: {self.model!r} has a place in [models.{self.model_name}] too: leave out one")
        served = self.list_served()
        if not served:
            return
        for name, profile in self.models.items():
            verifier = profile.verifier
            named = PrmVerifier | OutcomeVerifier | LanguageModelVerifier
            needed = verifier.model if isinstance(verifier, named) else None
            if needed is not None and needed not in served:
                raise ConfigError(
                    f"models.{name}.verifier: model {needed!r} is not served; served are {', '.join(sorted(served))}; "
                    f"give it a path or a url in [models.{needed}]"
                )

    def list_served(self) -> set[str]:
        """Return the names of all models, those that only score included; empty if servers may have any: /readyz tells.

        Raises ``ConfigError`` for the folder of an adapter.
        """
        if self.engine_url:  # the folders of its adapters are on its machine
            return set()
        scorer = {self.prm_name} if self.prm_url and self.prm_name is not None else set()
        elsewhere = {name for name, profile in self.models.items() if profile.url}
        return {*self.local_models(), *self.adapter_folders(), *self.remote_models(), *elsewhere, *scorer}

    def _check_engines(self) -> None:
        """Raise ``ConfigError`` for a model that two servers have, that has another place, or without a known price."""
        owners = self.remote_models()
        for name, engine in self.engines.items():
            for model in engine.models:
                if owners[model] != name:
                    raise ConfigError(f"engines.{name}.models: {model!r} is a model of engines.{owners[model]}, too")
                profile = self.models.get(model)
                if profile is not None and (profile.path is not None or profile.url):
                    raise ConfigError(f"engines.{name}.models: {model!r} has a place in [models.{model}], too")
                if engine.prices is not None and (profile is None or profile.prices is None):
                    try:
                        find_prices(engine.prices, model)
                    except NotInCatalogue as error:
                        hint = f"or give [models.{model}.prices] in numbers"
                        raise ConfigError(f"engines.{name}.prices: {error}; {hint}") from None

    def _check_templates(self) -> None:
        """Raise ``ConfigError`` for the chat template of a model that our engine does not load."""
        local = self.local_models()
        for name, profile in self.models.items():
            is_far = bool(self.engine_url) and not resolve_model_path(self._find_value(name)).exists()
            if profile.chat_template is not None and (name not in local or is_far):
                raise ConfigError(
                    f"models.{name}.chat_template: it belongs to a model that our engine loads, and {name!r} is not "
                    "one here: its server uses its own template; leave it out, or give the model a path"
                )

    def _resolve_name(self, value: str) -> str:
        return value if value in self.models or value in self.remote_models() else served_name(value)

    def _find_value(self, name: str) -> str:
        """Return the value of a served model."""
        profile = self.models.get(name)
        if profile is not None and profile.path is not None:
            return profile.path
        given = (value for value in (self.model, self.prm) if value is not None and self._resolve_name(value) == name)
        return next(given, name)
