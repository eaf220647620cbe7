"""Values of settings: addresses, secrets, and models with the folders of their weights."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from engine.gguf.paths import is_gguf
from engine.installation import require_engine
from engine.protocol.types import EngineError

BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"
BUNDLED_PRM = "prm"
_OWN_FOLDERS = ("v1", "dashboard", "docs")


class ConfigError(Exception):
    """Invalid configuration; the message names the setting and a valid value."""


def decode_webhook_secret(text: str) -> bytes:
    """Return the bytes of ``whsec_…``. Raises ``ValueError``."""
    try:
        secret = base64.b64decode(text.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        secret = b""
    if not text.startswith("whsec_") or not 24 <= len(secret) <= 64:
        raise ValueError("a webhook secret is 'whsec_' and 24 to 64 random bytes in base64")
    return secret


def served_name(model_ref: str) -> str:
    """Return the name in ``NAME=PATH``, of a folder or GGUF file, else the reference (bundled or remote)."""
    name, separator, _ = model_ref.partition("=")
    if separator:
        return name
    path = Path(model_ref).expanduser()
    if path.is_dir():
        return path.name
    return path.stem if is_gguf(path) and path.is_file() else model_ref


def is_bundled(model_ref: str) -> bool:
    """Return True for the name of a bundled model."""
    return "/" not in model_ref and "=" not in model_ref and (BUNDLED / model_ref / "config.json").is_file()


def resolve_model_path(model_ref: str) -> Path:
    """Return the place of ``NAME=PATH``, of a path or of a bundled model, which may not exist."""
    _, separator, path = model_ref.partition("=")
    return BUNDLED / model_ref if is_bundled(model_ref) else Path(path if separator else model_ref).expanduser()


def find_model_folder(model_ref: str) -> Path | None:
    """Return the folder of ``NAME=PATH``, of a path or of a bundled model; ``None`` if not on this machine.

    For a GGUF file, or a folder with one, that is the folder which presents it. Raises ``ConfigError`` if it is damaged
    or not supported.
    """
    folder = resolve_model_path(model_ref)
    if folder.exists() and is_gguf(folder):
        try:
            require_engine(f"reading the GGUF file {folder}")
            from engine.gguf.folder import open_gguf_folder  # takes half a second to import

            return open_gguf_folder(folder)
        except EngineError as error:
            raise ConfigError(str(error)) from None
    return folder.absolute() if (folder / "config.json").is_file() else None


def require_model_folder(model_ref: str, setting: str) -> Path:
    """Like ``find_model_folder``, but raises ``ConfigError`` if the folder is not on this machine."""
    folder = find_model_folder(model_ref)
    if folder is None:
        names = ", ".join(sorted(child.parent.name for child in BUNDLED.glob("*/config.json"))) or "none"
        raise ConfigError(
            f"{setting}: {model_ref!r} is neither a bundled model (here: {names}) nor a Hugging Face model folder, "
            "which holds config.json and *.safetensors, nor a GGUF file"
        )
    return folder


def read_environment_key(name: str) -> SecretStr:
    """Return the API key in an environment variable. Raises ``ConfigError`` if there is none."""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"api_key_env: the environment has no variable {name!r}, or it is empty")
    return SecretStr(key)


def read_key_file(path: Path) -> SecretStr:
    """Return the API key in a file. Raises ``ConfigError`` if it cannot be read or is empty."""
    try:
        key = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_key_file: {path} cannot be read: {error}") from None
    if not key or len(key.split()) > 1:
        raise ConfigError(f"api_key_file: {path} must hold the key alone, in one line")
    return SecretStr(key)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach ``host``."""
    host = host.lower().removesuffix(".")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_url(url: str, schemes: tuple[str, ...]) -> str:
    """Return the URL. Raises ``ValueError`` for an invalid one."""
    if not url.startswith(schemes):
        raise ValueError(f"must start with one of {', '.join(schemes)}")
    _ = urlsplit(url).port  # raises for an invalid port or host
    return url


def check_root_path(path: str) -> str:
    """Return the path of a service behind a proxy, without a slash at its end. Raises ``ValueError``."""
    path = path.rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise ValueError("must be a path such as /reasoner")
    if path.partition("/")[2].partition("/")[0] in _OWN_FOLDERS:
        raise ValueError(f"must not begin with one of the service's own folders: {', '.join(_OWN_FOLDERS)}")
    return path


def check_origin(origin: str) -> str:
    """Return the origin of web pages. Raises ``ValueError``."""
    if origin != "*":
        check_url(origin, ("http://", "https://"))
        if urlsplit(origin).netloc.lower() != origin.partition("://")[2]:
            raise ValueError("an origin is a scheme and a host in small letters, as in https://app.example")
    return origin
