"""Profiles of models: where each is, and the settings that it brings, also those in a file beside it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from engine.gguf.paths import is_gguf
from engine.gguf.template_setting import anchor_template, read_template
from engine.protocol.types import EngineError
from prm.formats.registry import FormatName
from reasoner.admission.defaults import ModelDefaults
from workers.config.api_key import WithApiKey
from workers.config.explain import explain_field
from workers.config.types import ConfigError, check_url, resolve_model_path

MODEL_FILE = "reasoner-model.toml"
"""File in a model's folder with its settings; beside FILE.gguf it is FILE.gguf.toml."""


class ModelFile(ModelDefaults):
    """The settings that may lie beside a model."""

    chat_template: str | None = Field(
        None,
        description="The chat template that our engine uses instead of the model's own: a .jinja file, the template's "
        "text (with {{ or {%), or none for a base model, which continues the texts of a conversation plainly.",
    )

    @field_validator("chat_template")
    @classmethod
    def _check_template(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        folder: Path = (info.context or {}).get("folder", Path.cwd())
        value = anchor_template(value, folder) if value.strip() else value
        try:
            read_template(value)
        except EngineError as error:
            raise ValueError(str(error)) from None
        return value


class ModelProfile(ModelFile, WithApiKey):
    """One model: the place from which it is served, and the defaults of its jobs."""

    path: str | None = Field(None, description="A bundled model, a model folder or a GGUF file, for our engine.")
    adapter: Path | None = Field(
        None, description="The folder of a LoRA adapter that PEFT has saved, of the service's model, for our engine."
    )
    url: tuple[str, ...] = Field(
        (), description="The URL of a server of the model, or several of interchangeable ones."
    )
    tokenizer: Path | None = Field(
        None, description="The folder of the model behind url, if its server takes no token ids or cannot tokenise."
    )
    parameters: int | None = Field(
        None,
        ge=1,
        description="The number of the model's weights, for its FLOPs, if its server and folder do not tell.",
    )
    prm_format: FormatName | None = Field(
        None, description="The format in which a verifier reads steps, if its checkpoint does not determine it."
    )

    @field_validator("url", mode="before")
    @classmethod
    def _single_url(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _check_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_url(url, ("http://", "https://", "unix://")) for url in value)

    @model_validator(mode="after")
    def _check_one_place(self) -> Self:
        if self.path is not None and self.url:
            raise ValueError("give either 'path', for our engine, or 'url', of another server, not both")
        if self.adapter is not None and (self.path is not None or self.url or self.chat_template is not None):
            raise ValueError("a model with 'adapter' has path, url and chat_template of the model that it adapts")
        if self.chat_template is not None and self.url:
            raise ValueError(
                "'chat_template' belongs to a model with 'path', for our engine: the server at 'url' uses its own"
            )
        for name in ("tokenizer", "api_key_env", "api_key_file"):
            if getattr(self, name) is not None and not self.url:
                raise ValueError(f"{name!r} belongs to a model with 'url': leave it out")
        return self

    @property
    def place(self) -> tuple[Any, ...]:
        """Everything that a running service cannot change."""
        return (
            self.path,
            self.adapter,
            self.url,
            self.tokenizer,
            self.prm_format,
            self.chat_template,
            self.api_key_env,
            self.api_key_file,
        )


def read_model_file(model_ref: str) -> ModelFile | None:
    """Return the settings beside a model, given in the form of the setting ``model``; ``None`` if there are none.

    Raises ``ConfigError`` for an invalid file.
    """
    path = resolve_model_path(model_ref)
    if not path.exists():
        return None
    file = path.with_name(f"{path.name}.toml") if path.is_file() and is_gguf(path) else path / MODEL_FILE
    if not file.is_file():
        return None
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
        return ModelFile.model_validate(fields, context={"folder": file.parent})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file}: {where and f'{where}: '}{explain_field(first, ModelFile)}") from None
    except (OSError, ValueError) as error:  # not readable, or no TOML
        raise ConfigError(f"{file}: {error}") from None
