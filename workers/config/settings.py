"""Settings of all roles: from the environment (``REASONER_*``), then from ``reasoner.toml``, then defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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

from engine.protocol.options import Device, DType, KVDType
from engine.remote.proxies import InvalidProxy, find_proxy_url
from reasoner.admission.calibration import load_calibration
from reasoner.admission.defaults import ModelDefaults
from reasoner.admission.effort import DEFAULT_EFFORTS, Effort
from reasoner.admission.names import Name, NameFault, find_name
from reasoner.budget.spec import MAX_BUDGET_SECONDS, MAX_BUDGET_TOKENS
from reasoner.confidence.calibration import Calibration, CalibrationError
from reasoner.jobs.spec import FALLBACK_STRATEGY, EngineWait
from reasoner.strategies.registry import STRATEGIES
from workers.config.address import HOST, PORT
from workers.config.broker_address import parse_broker_url
from workers.config.engine_options import ENGINE_OPTIONS, engine_option
from workers.config.explain import CONFIG_FILE, describe_origin, explain, explain_unreadable, find_moved_variable
from workers.config.model_settings import ModelSettings
from workers.config.rate_limits import LimitsTable
from workers.config.types import (
    ConfigError,
    check_origin,
    check_root_path,
    decode_webhook_secret,
    is_loopback,
    require_model_folder,
)

QueueName = Literal["interactive", "webhooks", "batch"]
QUEUES: Final[tuple[QueueName, ...]] = ("interactive", "webhooks", "batch")
"""The order in which a free slot polls the queues. The priority of a job is the name of its queue."""
MIN_KEY_CHARS = 16
RELOADABLE: Final = frozenset(
    {
        "budget_seconds",
        "budget_tokens",
        "effort",
        "limits",
        "models",
        "names",
        "queue_cap",
        "webhook_allow",
        "webhook_secret",
        "webhook_secrets",
    }
)
"""Settings that change with the file while a process runs (``workers.config.reload``)."""


class Settings(ModelSettings):
    """All settings of a service."""

    model_config = SettingsConfigDict(
        env_prefix="REASONER_", extra="forbid", toml_file=CONFIG_FILE, frozen=True, hide_input_in_errors=True
    )

    redis_url: str | None = Field(
        None, description="The URL of the broker and store; without it, an embedded one in data_dir is used."
    )
    engine_kv_tokens: int | None = engine_option("kv_tokens")
    engine_state_slots: int | None = engine_option("state_slots")
    engine_max_running: int | None = engine_option("max_running")
    engine_max_waiting: int | None = engine_option("max_waiting")
    engine_step_tokens: int | None = engine_option("step_tokens")
    engine_lease_share: float | None = engine_option("lease_share")
    engine_lease_seconds: float | None = engine_option("lease_seconds")
    engine_cache_disk: str | None = engine_option("cache_disk")
    engine_cache_disk_gb: float | None = engine_option("cache_disk_gb")
    engine_cache_host_gb: float | None = engine_option("cache_host_gb")
    engine_device: Device | None = engine_option("device")
    engine_dtype: DType | None = engine_option("dtype")
    engine_kv_dtype: KVDType | None = engine_option("kv_dtype")
    engine_gpu_memory_utilization: float | None = engine_option("gpu_memory_utilization")
    engine_deterministic: bool = engine_option("deterministic", False)
    engine_strict_config: bool = engine_option("strict_config", False)
    engine_threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="The number of threads that compute one step; by default one for each core."
    )
    draft: str = Field("auto", description=f"{ENGINE_OPTIONS['draft'].metadata['help']}; auto by default.")
    draft_length: Annotated[int, Field(le=16)] | None = engine_option("draft_length")
    probe: str = engine_option("probe", "auto")
    calibration: Path | None = Field(
        None,
        description="The table of 'reasoner calibrate' for the strategy auto; by default that of the bundled models.",
    )
    host: str = Field(HOST, description="The address that the API listens on.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(PORT, description="The port of the API.")
    data_dir: Path = Field(Path(".reasoner"), description="The folder of the embedded broker, of logs and sockets.")
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_BUDGET_TOKENS)] = Field(
        20_000, description="The token budget of a job that names none."
    )
    budget_seconds: Annotated[float, Field(gt=0, le=MAX_BUDGET_SECONDS)] = Field(
        300.0, description="The time budget, in seconds, of a job that names none."
    )
    effort: dict[str, Effort] = Field(
        default_factory=lambda: DEFAULT_EFFORTS, description="The efforts by name, in addition to the built-in ones."
    )
    names: dict[str, Name] = Field(
        default_factory=dict,
        description="The names that clients may give as a model, and what each stands for: models, a strategy, a "
        "verifier, a budget, sampling.",
    )
    unlocked_tests: bool = Field(
        False, description="Run Python tests of clients even without a sandbox, with all rights of the worker."
    )
    concurrency: Annotated[int, Field(ge=1, le=1024)] = Field(
        32, description="The maximum number of jobs that one worker runs at once."
    )
    queues: Annotated[tuple[QueueName, ...], NoDecode, Field(min_length=1)] = Field(
        QUEUES, description="The queues of a worker, in order of precedence: interactive, webhooks, batch."
    )
    pools: dict[QueueName, Annotated[int, Field(ge=1, le=1024)]] = Field(
        default_factory=dict,
        description="The slots of separate worker processes by queue under 'reasoner serve'; one has the others.",
    )
    alive_file: Path | None = Field(
        None, description="The file that a worker touches each second while it can take jobs, for health checks."
    )
    engine_wait_seconds: EngineWait = Field(
        3600.0,
        description="The time for which a job waits for an engine that does nothing for it, before it ends with what "
        "it has; a job may name its own.",
    )
    max_attempts: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="The maximum number of successive attempts of a job that lose their worker without progress."
    )
    lease_seconds: Annotated[float, Field(ge=0.5, le=60)] = Field(
        3.0, description="The number of seconds without a heartbeat after which a worker counts as dead."
    )
    queue_cap: Annotated[int, Field(ge=1)] = Field(
        10_000, description="The maximum number of waiting jobs; more are refused with 503."
    )
    keep_alive_seconds: Annotated[int, Field(ge=1, le=86_400)] = Field(
        75,
        description="The number of seconds for which an idle connection is kept, longer than by a proxy in front.",
    )
    root_path: str = Field(
        "", description="The path below which a proxy serves the API, such as /reasoner; it may strip it or not."
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="The origins of web pages that may call the API, such as https://app.example; or *.",
    )
    body_cap: Annotated[int, Field(ge=1024)] = Field(
        16 << 20, description="The maximum size of a request body in bytes."
    )
    files_dir: Path | None = Field(
        None,
        description="The folder of uploaded files and of batches' results, which all API processes of a service share; "
        "by default 'files' in data_dir.",
    )
    file_cap: Annotated[int, Field(ge=1024)] = Field(
        200 << 20, description="The maximum size of an uploaded file in bytes."
    )
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="The bearer keys with all rights; make others with 'reasoner keys'."
    )
    otlp_url: str | None = Field(
        None,
        description="The collector of traces (OTLP/HTTP), such as http://127.0.0.1:4318; without it, they are off.",
    )
    retention_seconds: Annotated[float, Field(gt=0)] = Field(
        30 * 86_400.0, description="The number of seconds for which a job and its journal are kept after its end."
    )
    archive_url: SecretStr | None = Field(
        None,
        description="The SQL database of ended jobs: postgresql://USER:PASSWORD@HOST/DATABASE, or sqlite:////PATH on "
        "one machine; by default a file in data_dir with the embedded broker, and none with another.",
    )
    archive_after_seconds: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="The number of seconds after its end at which a job moves from the broker's memory to the archive; "
        "by default a day with the embedded broker, and an hour with another.",
    )
    limits: LimitsTable = Field(
        default_factory=LimitsTable, description="The limits of all owners, and in [limits.OWNER] those of one owner."
    )
    webhook_secret: SecretStr | None = Field(
        None, description="The secret of webhooks: 'whsec_' and 24 to 64 bytes in base64; without it, they are refused."
    )
    webhook_secrets: dict[str, SecretStr] = Field(
        default_factory=dict, description="The secrets that sign webhooks instead, by owner."
    )
    webhook_allow: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="The private hosts that may receive webhooks, also over plain http."
    )

    _given: frozenset[str] = PrivateAttr(frozenset())

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_broker_url(value)
        return value

    @field_validator("archive_url")
    @classmethod
    def _check_archive_url(cls, value: SecretStr | None) -> SecretStr | None:
        url = urlsplit("" if value is None else value.get_secret_value())
        is_file = url.scheme == "sqlite" and not url.netloc and url.path.startswith("//")
        if value is not None and not is_file and not (url.scheme == "postgresql" and url.hostname and url.path[1:]):
            raise ValueError(
                "must be postgresql://USER:PASSWORD@HOST/DATABASE, or sqlite:////PATH with an absolute path"
            )
        return value

    @field_validator("otlp_url")
    @classmethod
    def _check_otlp_url(cls, value: str | None) -> str | None:
        if value is not None and not (value.startswith(("http://", "https://")) and urlsplit(value).hostname):
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT of a collector")
        return value

    @field_validator("root_path")
    @classmethod
    def _check_root_path(cls, value: str) -> str:
        return check_root_path(value)

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_origin, value))

    @field_validator("data_dir")
    @classmethod
    def _make_absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("effort")
    @classmethod
    def _add_built_in(cls, value: dict[str, Effort]) -> dict[str, Effort]:
        return DEFAULT_EFFORTS | value

    @field_validator("webhook_secret")
    @classmethod
    def _check_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            decode_webhook_secret(value.get_secret_value())
        return value

    @field_validator("webhook_secrets")
    @classmethod
    def _check_secrets(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for secret in value.values():
            decode_webhook_secret(secret.get_secret_value())
        return value

    @field_validator("webhook_allow")
    @classmethod
    def _lower_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(host.lower() for host in value)

    @field_validator("queues")
    @classmethod
    def _drop_repeated(cls, value: tuple[QueueName, ...]) -> tuple[QueueName, ...]:
        return tuple(dict.fromkeys(value))

    @field_validator("api_keys", "cors_origins", "engine_url", "prm_url", "queues", "webhook_allow", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        parts = value.split(",") if isinstance(value, str) else value
        return [part.strip() for part in parts if part.strip()] if isinstance(parts, list) else parts

    @field_validator("api_keys")
    @classmethod
    def _check_key_lengths(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
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
    def files_folder(self) -> Path:
        """The folder of files."""
        return self.data_dir / "files" if self.files_dir is None else self.files_dir.expanduser().absolute()

    @property
    def archive_address(self) -> str | None:
        """The URL of the archive; ``None`` for a service that keeps ended jobs in Redis."""
        if self.archive_url is not None:
            return self.archive_url.get_secret_value()
        return f"sqlite:///{self.data_dir / 'archive.sqlite3'}" if self.redis_url is None else None

    @property
    def archive_after(self) -> float:
        """The seconds after its end at which a job moves to the archive."""
        if self.archive_after_seconds is not None:
            return self.archive_after_seconds
        return 86_400.0 if self.redis_url is None else 3600.0

    @property
    def drafter(self) -> str:
        """The value of ``draft`` with an absolute folder. Raises ``ConfigError``."""
        kind, equals, folder = self.draft.partition("=")
        if kind == "draft_model" and equals:
            return f"{kind}={require_model_folder(folder, 'draft')}"
        return f"{kind}={Path(folder).expanduser().absolute()}" if equals else kind

    def read_calibration(self) -> Calibration | None:
        """Return the configured table. Raises ``ConfigError`` for an invalid one."""
        if self.calibration is None:
            return None
        try:
            return load_calibration(self.calibration.expanduser())
        except CalibrationError as error:
            raise ConfigError(str(error)) from None

    @property
    def given(self) -> dict[str, Any]:
        """The settings that override the environment and the file: from a command line, or set by this process."""
        return {name: getattr(self, name) for name in self._given}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy. The updated settings count as ``given``."""
        copy = super().model_copy(update=update, deep=deep)
        copy._given = self._given | (update or {}).keys()
        return copy

    def renewed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with changes of the file, which do not count as ``given``."""
        return super().model_copy(update=changes)

    def environment(self) -> dict[str, str]:
        """Return the ``given`` settings as environment variables, for a child process of another role.

        The child inherits the environment, and reads and reloads the file itself.
        """
        values: dict[str, str] = {}
        for name, value in self.given.items():
            if isinstance(value, tuple):
                value = ",".join(map(_to_plain, value))
            if isinstance(value, dict):
                value = json.dumps({key: _to_plain(part) for key, part in value.items()}, default=os.fspath)
            if isinstance(value, SecretStr):
                value = _to_plain(value)
            if isinstance(value, BaseModel):
                value = value.model_dump_json(exclude_unset=True)
            if value is not None:
                values[f"REASONER_{name.upper()}"] = str(value)
        return values

    def check_bind(self, *, stored_keys: bool) -> None:
        """Raise ``ConfigError`` for an address reachable from other machines without configured or stored keys."""
        if not is_loopback(self.host) and not self.api_keys and not stored_keys:
            raise ConfigError(
                f"host {self.host!r} is reachable from other machines: make a key with 'reasoner keys create --direct'"
                ", set REASONER_API_KEYS, or bind 127.0.0.1"
            )


def load_settings(**overrides: Any) -> Settings:
    """Load the settings. ``overrides`` (of a command line) take precedence over all sources. Raises ``ConfigError``."""
    moved = find_moved_variable()
    if moved is not None:
        raise ConfigError(moved)
    try:
        settings = Settings(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        where = ".".join([describe_origin(name, overrides), *map(str, first["loc"][1:])])
        raise ConfigError(f"{where}: {explain(first, name, Settings)}") from None
    except SettingsError as error:
        raise ConfigError(explain_unreadable(error)) from None
    except ValueError as error:  # a file that is not TOML
        raise ConfigError(f"{CONFIG_FILE}: {error}") from None
    settings = settings.with_model_files()
    settings._given = frozenset(overrides)
    settings.check_endpoints()
    _check_names(settings)
    _check_proxies(settings)
    _refuse_uses_of_verifier(settings, overrides)
    return settings


def _check_names(settings: Settings) -> None:
    """Raise ``ConfigError`` for a name that is a served model, stands for itself, or for no model alone in a list."""
    served = settings.list_served()
    for word, name in settings.names.items():
        where = f"names.{word}"
        if not word.strip():
            raise ConfigError(f"names: {word!r} is no name: give it a word")
        if word in served or word in settings.models or word in (settings.model_name, settings.prm_name):
            raise ConfigError(f"{where}: {word!r} is a served model: give the name another word")
        if name.own_effort is not None and name.own_effort not in settings.effort:
            efforts = ", ".join(settings.effort)
            raise ConfigError(f"{where}.effort: there is no effort {name.own_effort!r}; known are {efforts}")
        try:
            found = find_name(word, settings, served)
        except NameFault as fault:
            raise ConfigError(f"{where}: {fault}") from None
        idle = [] if found is None else sorted(found.fixed - found.fields.keys() - {"system"})
        if idle:
            raise ConfigError(f"{where}.fixed: the name does not give {idle[0]!r}: give it, or leave it out of 'fixed'")


def _check_proxies(settings: Settings) -> None:
    """Raise ``ConfigError`` if the environment names an unusable proxy for one of the servers."""
    urls = [*settings.engine_addresses, *(settings.prm_url or ()), *filter(None, [settings.otlp_url])]
    urls += [url for profile in settings.models.values() for url in profile.url]
    urls += [url for profile in settings.engines.values() for url in profile.url]
    try:
        for url in urls:
            find_proxy_url(url)
    except InvalidProxy as error:
        raise ConfigError(str(error)) from None


def _refuse_uses_of_verifier(settings: Settings, overrides: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for settings that require a verifier where there is none."""
    for name in ("prm_url", "prm_tokenizer", "prm_format", "prm_api_key"):
        if settings.verifier is None and getattr(settings, name):
            raise ConfigError(
                f"{describe_origin(name, overrides)}: no verifier is configured; set REASONER_PRM, or remove this"
            )
    tables: dict[str, Effort | ModelDefaults] = {
        f"models.{name}": table for name, table in settings.models.items() if settings.default_verifier(name) is None
    }
    if settings.default_verifier(settings.model_name) is None:
        changed = {name: effort for name, effort in settings.effort.items() if effort != DEFAULT_EFFORTS.get(name)}
        tables |= {f"effort.{name}": effort for name, effort in changed.items()}
    for name, table in tables.items():
        if table.strategy is not None and STRATEGIES[table.strategy.name].needs_verifier:
            raise ConfigError(
                f"{describe_origin(name, overrides)}.strategy: {table.strategy.name!r} needs a verifier, and "
                f"none is configured; set REASONER_PRM, name one in the model's table, or use {FALLBACK_STRATEGY}"
            )


def _to_plain(value: Any) -> Any:
    """Return a part of a setting in the form of the environment."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return value.model_dump(exclude_none=True, exclude_unset=True) if isinstance(value, BaseModel) else value
