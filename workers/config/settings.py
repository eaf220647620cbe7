"""Configuration of every role: environment ``REASONER_*``, then ``reasoner.toml`` in this folder, then defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, PrivateAttr, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from engine.protocol.options import Device, DType, EngineOptions, KVDType
from prm.formats.registry import FormatName
from reasoner.admission.calibration import load_calibration
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.effort import DEFAULT_EFFORTS, Effort
from reasoner.budget.prices import Prices
from reasoner.budget.spec import MAX_BUDGET_SECONDS, MAX_BUDGET_TOKENS
from reasoner.confidence.calibration import Calibration, CalibrationError
from reasoner.jobs.spec import FALLBACK_STRATEGY
from reasoner.strategies.registry import STRATEGIES
from workers.config.rate_limits import Limits, LimitsTable
from workers.config.types import (
    BUNDLED_PRM,
    ConfigError,
    address,
    decode_webhook_secret,
    is_bundled,
    is_loopback,
    require_model_folder,
    served_name,
)

QueueName = Literal["interactive", "webhooks", "batch"]
QUEUES: Final[tuple[QueueName, ...]] = ("interactive", "webhooks", "batch")
"""In the order in which a free slot looks into them. A job's priority is the name of its queue."""
CONFIG_FILE = "reasoner.toml"
DEFAULT_ENGINE_URL = "http://127.0.0.1:8100"
MIN_KEY_CHARS = 16
NO_PRM = "none"


_SECRETS = ("api_keys", "redis_url", "webhook_secret", "webhook_secrets")


RELOADABLE: Final = frozenset(
    {
        "budget_seconds",
        "budget_tokens",
        "effort",
        "limits",
        "models",
        "prices",
        "queue_cap",
        "webhook_allow",
        "webhook_secret",
        "webhook_secrets",
    }
)
"""Settings that change with the file while a process runs (``workers.config.reload``)."""


ENGINE_OPTIONS: Final = {option.name: option for option in fields(EngineOptions)}


def _engine_option(name: str, default: Any = None) -> Any:
    """Return the setting of an option of the engine: its help and bounds. ``None`` leaves it to the engine."""
    option = ENGINE_OPTIONS[name]
    description = option.metadata["help"]
    if option.default is not None and option.default is not False:
        description += f"; {option.default} by default"
    bounds = {bound: limit for bound, limit in option.metadata.items() if bound in ("ge", "gt", "le")}
    return Field(default, description=f"{description}.", **bounds)


class Settings(BaseSettings):
    """What an operator may decide."""

    model_config = SettingsConfigDict(env_prefix="REASONER_", extra="forbid", toml_file=CONFIG_FILE, frozen=True)

    redis_url: str | None = Field(None, description="Broker and store; without it an embedded one in data_dir.")
    engine_url: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Running engines that can stand in for each other; without any the one of this machine."
    )
    engine_tokenizer: Path | None = Field(
        None, description="Folder of the model behind engine_url, where they take no token ids or cannot tokenise."
    )
    engine_kv_tokens: int | None = _engine_option("kv_tokens")
    engine_max_running: int | None = _engine_option("max_running")
    engine_max_waiting: int | None = _engine_option("max_waiting")
    engine_step_tokens: int | None = _engine_option("step_tokens")
    engine_lease_share: float | None = _engine_option("lease_share")
    engine_lease_seconds: float | None = _engine_option("lease_seconds")
    engine_device: Device | None = _engine_option("device")
    engine_dtype: DType | None = _engine_option("dtype")
    engine_kv_dtype: KVDType | None = _engine_option("kv_dtype")
    engine_deterministic: bool = _engine_option("deterministic", False)
    engine_threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="The number of threads that compute one step; by default one for each core."
    )
    draft: str = Field("auto", description=f"{ENGINE_OPTIONS['draft'].metadata['help']}; auto by default.")
    draft_length: Annotated[int, Field(le=16)] | None = _engine_option("draft_length")
    model: str = Field("policy", description="A bundled model, a model folder, or NAME=FOLDER.")
    prm: str | None = Field(
        None,
        description="The verifier: a bundled model, a model folder, NAME=FOLDER, or none; by default the bundled one "
        "for a bundled model, else none.",
    )
    prm_url: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Servers of the verifier under its name, which can stand in for each other: see engine_url."
    )
    prm_tokenizer: Path | None = Field(
        None, description="Folder of the model behind prm_url (config and tokenizer), if that server is not ours."
    )
    prm_format: FormatName | None = Field(
        None, description="How the verifier reads steps, where its checkpoint does not show it."
    )
    calibration: Path | None = Field(
        None, description="Table of 'reasoner calibrate' for the strategy auto; without it that of the bundled models."
    )
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    data_dir: Path = Path(".reasoner")
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] = Field(
        20_000, description="Budget of a job that names none."
    )
    budget_seconds: Annotated[float, Field(gt=0, le=MAX_BUDGET_SECONDS)] = Field(
        300.0, description="Budget of a job that names none."
    )
    prices: dict[str, Prices] = Field(
        default_factory=dict, description="By model: what a million tokens cost. A budget in money needs them."
    )
    models: dict[str, ModelDefaults] = Field(
        default_factory=dict, description="By model: sampling, budget and strategy of jobs that do not say."
    )
    effort: dict[str, Effort] = Field(
        default_factory=lambda: DEFAULT_EFFORTS, description="Budgets by name; these come on top of the built-in ones."
    )
    unlocked_tests: bool = Field(
        False,
        description="Run a client's Python tests where no sandbox can hold them: they could do what a worker may.",
    )
    concurrency: Annotated[int, Field(ge=1, le=1024)] = Field(32, description="Jobs that one worker runs at once.")
    queues: Annotated[tuple[QueueName, ...], NoDecode, Field(min_length=1)] = Field(
        QUEUES, description="What a worker takes its jobs from, the first ones first: interactive, webhooks, batch."
    )
    pools: dict[QueueName, Annotated[int, Field(ge=1, le=1024)]] = Field(
        default_factory=dict,
        description="By queue: slots of a worker process of its own under 'reasoner serve'; one worker has the others.",
    )
    alive_file: Path | None = Field(
        None, description="File that a worker touches every second while it can take jobs, for health checks."
    )
    max_attempts: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="Times in a row that a job may lose its worker without a step forward before it is given up."
    )
    lease_seconds: Annotated[float, Field(ge=0.5, le=60)] = Field(
        3.0, description="Silence after which a worker is taken for dead."
    )
    queue_cap: Annotated[int, Field(ge=1)] = Field(10_000, description="Waiting jobs; more are refused with 503.")
    body_cap: Annotated[int, Field(ge=1024)] = Field(1 << 20, description="Largest request body in bytes.")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="Bearer keys that may do everything; more are made with 'reasoner keys'."
    )

    otlp_url: str | None = Field(
        None, description="Collector that takes traces over OTLP/HTTP, such as http://127.0.0.1:4318. Without it none."
    )
    retention_seconds: Annotated[float, Field(gt=0)] = Field(
        30 * 86_400.0, description="How long a job is kept after its end; then it vanishes with its journal."
    )
    limits: LimitsTable = Field(
        default_factory=LimitsTable,
        description="Of what everybody may use, and in [limits.OWNER] of what one owner may.",
    )
    webhook_secret: SecretStr | None = Field(
        None, description="Signs webhooks: 'whsec_' and 24 to 64 bytes in base64. Without it no webhook is taken."
    )
    webhook_secrets: dict[str, SecretStr] = Field(
        default_factory=dict, description="By owner of a key: what signs the webhooks of this owner's jobs instead."
    )
    webhook_allow: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Hosts to which webhooks go although they are private, and without TLS where they ask for it."
    )

    _given: frozenset[str] = PrivateAttr(frozenset())

    @field_validator("redis_url")
    @classmethod
    def _broker(cls, value: str | None) -> str | None:
        return None if value is None else address(value, ("redis://", "rediss://", "unix://"))

    @field_validator("engine_url", "prm_url")
    @classmethod
    def _servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a server twice")
        return tuple(address(url, ("http://", "https://", "unix://")) for url in value)

    @field_validator("otlp_url")
    @classmethod
    def _over_http(cls, value: str | None) -> str | None:
        if value is not None and not (value.startswith(("http://", "https://")) and urlsplit(value).hostname):
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT of a collector")
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("effort")
    @classmethod
    def _with_built_in(cls, value: dict[str, Effort]) -> dict[str, Effort]:
        return DEFAULT_EFFORTS | value

    @field_validator("webhook_secret")
    @classmethod
    def _a_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            decode_webhook_secret(value.get_secret_value())
        return value

    @field_validator("webhook_secrets")
    @classmethod
    def _secrets(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for secret in value.values():
            decode_webhook_secret(secret.get_secret_value())
        return value

    @field_validator("webhook_allow")
    @classmethod
    def _as_compared(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(host.lower() for host in value)

    @field_validator("queues")
    @classmethod
    def _each_once(cls, value: tuple[QueueName, ...]) -> tuple[QueueName, ...]:
        return tuple(dict.fromkeys(value))

    @field_validator("api_keys", "engine_url", "prm_url", "queues", "webhook_allow", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        return [part.strip() for part in parts if part.strip()] if isinstance(parts, list) else parts

    @field_validator("api_keys")
    @classmethod
    def _long_keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(len(key.get_secret_value()) < MIN_KEY_CHARS for key in value):
            raise ValueError(f"a key needs at least {MIN_KEY_CHARS} characters")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def drafter(self) -> str:
        """``draft`` with the folder that it names, as the engine takes it. Raises ``ConfigError``."""
        kind, equals, where = self.draft.partition("=")
        if kind == "draft_model" and equals:
            return f"{kind}={require_model_folder(where, 'draft')}"
        return f"{kind}={Path(where).expanduser().absolute()}" if equals else kind

    def read_calibration(self) -> Calibration | None:
        """The configured table. Raises ``ConfigError`` for one that cannot be used."""
        if self.calibration is None:
            return None
        try:
            return load_calibration(self.calibration.expanduser())
        except CalibrationError as error:
            raise ConfigError(str(error)) from None

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """The engines to talk to: the configured ones, or the one that ``reasoner engine`` is on this machine."""
        return self.engine_url or (DEFAULT_ENGINE_URL,)

    @property
    def model_name(self) -> str:
        """What jobs and the engine call the policy."""
        return served_name(self.model)

    @property
    def verifier(self) -> str | None:
        """The process reward model, as ``prm`` names one; ``None`` for a service without.

        The bundled one was trained on solutions of the bundled policies: it knows nothing of any other model's.
        """
        if self.prm is None:
            return BUNDLED_PRM if is_bundled(self.model) else None
        return None if self.prm == NO_PRM else self.prm

    @property
    def prm_name(self) -> str | None:
        """The name of the verifier in jobs and at the engine; ``None`` for a service without one."""
        return None if self.verifier is None else served_name(self.verifier)

    def require_prm(self, what: str) -> str:
        """Return ``prm_name``. Raises ``ConfigError`` that says ``what`` needs a verifier where there is none."""
        if self.prm_name is None:
            raise ConfigError(f"{what} needs a verifier, and there is none here; name one by REASONER_PRM")
        return self.prm_name

    @property
    def given(self) -> dict[str, Any]:
        """Those that this process was given beside the environment and the file: by a command line, or by itself."""
        return {name: getattr(self, name) for name in self._given}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As every model's; what is changed counts as given."""
        copy = super().model_copy(update=update, deep=deep)
        copy._given = self._given | (update or {}).keys()
        return copy

    def renewed(self, changes: Mapping[str, Any]) -> Self:
        """With what the file says now."""
        return super().model_copy(update=changes)

    def environment(self) -> dict[str, str]:
        """What was given as environment variables: how a parent hands its settings to a role that it starts.

        The role inherits the environment and reads the file itself, and goes on reading it.
        """
        values: dict[str, str] = {}
        for name, value in self.given.items():
            if isinstance(value, tuple):
                value = ",".join(map(_plain, value))
            if isinstance(value, dict):
                value = json.dumps({key: _plain(part) for key, part in value.items()})
            if isinstance(value, SecretStr):
                value = _plain(value)
            if isinstance(value, BaseModel):
                value = value.model_dump_json(exclude_unset=True)
            if value is not None:
                values[f"REASONER_{name.upper()}"] = str(value)
        return values

    def check_bind(self, *, stored_keys: bool) -> None:
        """Refuses to serve other machines without keys: configured ones, or ones in the store."""
        if not is_loopback(self.host) and not self.api_keys and not stored_keys:
            raise ConfigError(
                f"host {self.host!r} is reachable from other machines: make a key with 'reasoner keys create --direct'"
                ", set REASONER_API_KEYS, or bind 127.0.0.1"
            )


def load_settings(**overrides: Any) -> Settings:
    """Reads the configuration; ``overrides`` (a command line's) win over everything. Raises ``ConfigError``."""
    try:
        settings = Settings(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        where = ".".join([_origin(name, overrides), *map(str, first["loc"][1:])])
        raise ConfigError(f"{where}: {_explain(first, name)}") from None
    except (SettingsError, ValueError) as error:  # a file that is not TOML
        raise ConfigError(f"{CONFIG_FILE}: {error}") from None
    settings._given = frozenset(overrides)
    if settings.verifier is None:
        _refuse_uses_of_verifier(settings, overrides)
    return settings


def _refuse_uses_of_verifier(settings: Settings, overrides: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for a setting that makes no sense in a service without a verifier."""
    for name in ("prm_url", "prm_tokenizer", "prm_format"):
        if getattr(settings, name):
            raise ConfigError(
                f"{_origin(name, overrides)}: there is no verifier here; name it by REASONER_PRM, or leave this out"
            )
    tables: dict[str, Effort | ModelDefaults] = {
        f"effort.{name}": effort for name, effort in settings.effort.items() if effort != DEFAULT_EFFORTS.get(name)
    }
    tables |= {f"models.{name}": defaults for name, defaults in settings.models.items()}
    for name, table in tables.items():
        if table.strategy is not None and STRATEGIES[table.strategy.name].needs_verifier:
            raise ConfigError(
                f"{_origin(name, overrides)}.strategy: {table.strategy.name!r} needs a verifier, and there is none "
                f"here; set REASONER_PRM, or use {FALLBACK_STRATEGY}"
            )


def _plain(value: Any) -> Any:
    """A part of a setting as the environment has it."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return value.model_dump(exclude_none=True, exclude_unset=True) if isinstance(value, BaseModel) else value


def _origin(name: str, overrides: dict[str, Any]) -> str:
    if name in overrides:
        return f"--{name.removeprefix('engine_').replace('_', '-')}"
    variable = f"REASONER_{name.upper()}"
    return variable if variable in os.environ else f"{CONFIG_FILE}: {name}"


def _explain(error: Any, name: str) -> str:
    if error["type"] == "extra_forbidden":
        # Tables are by model or by effort: what is unknown in one is a field of that kind.
        kinds: dict[str, type[BaseModel]] = {
            "prices": Prices,
            "effort": Effort,
            "models": ModelDefaults,
            "limits": Limits,
        }
        known: Any = kinds[name] if len(error["loc"]) > 1 else Settings
        for part in error["loc"][2:-1]:  # behind the table's own name and the model's
            known = known.model_fields[part].annotation
        return f"no such setting: {error['loc'][-1]!r}; known are {', '.join(sorted(known.model_fields))}"
    message: str = error["msg"]
    shown = "" if name in _SECRETS else f" (got {error['input']!r})"  # those hold secrets
    return message.removeprefix("Value error, ") + shown
