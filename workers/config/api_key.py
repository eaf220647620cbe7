"""The API key of a server, named in the configuration and kept outside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from reasoner.base_model import StrictModel
from workers.config.types import read_environment_key, read_key_file


class WithApiKey(StrictModel):
    """Settings of a server that may ask for a key."""

    api_key_env: str | None = Field(None, description="The environment variable with the API key of url.")
    api_key_file: Path | None = Field(None, description="The file with the API key of url.")

    @model_validator(mode="after")
    def _check_one_key(self) -> Self:
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("give either 'api_key_env' or 'api_key_file', not both")
        return self

    def read_api_key(self) -> SecretStr | None:
        """Return the server's key. Raises ``ConfigError`` if it is not where it should be."""
        if self.api_key_env is not None:
            return read_environment_key(self.api_key_env)
        return None if self.api_key_file is None else read_key_file(self.api_key_file)
