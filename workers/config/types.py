"""What the value of a setting stands for: an address, a secret, a model and where its weights lie."""

from __future__ import annotations

import base64
import binascii
import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

BUNDLED = Path(__file__).parents[2] / "reasoner" / "bundled"
BUNDLED_PRM = "prm"


class ConfigError(Exception):
    """The configuration cannot work; the message names the setting and says what would be right."""


def decode_webhook_secret(text: str) -> bytes:
    """What ``whsec_…`` stands for. Raises ``ValueError``."""
    try:
        secret = base64.b64decode(text.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        secret = b""
    if not text.startswith("whsec_") or not 24 <= len(secret) <= 64:
        raise ValueError("a webhook secret is 'whsec_' and 24 to 64 random bytes in base64")
    return secret


def served_name(value: str) -> str:
    """The name in ``NAME=FOLDER``; a folder's own name; otherwise the value itself (a bundled or a remote model)."""
    name, separator, _ = value.partition("=")
    if separator:
        return name
    return Path(value).name if Path(value).expanduser().is_dir() else value


def is_bundled(value: str) -> bool:
    """Return True for the name of a bundled model."""
    return "/" not in value and "=" not in value and (BUNDLED / value / "config.json").is_file()


def find_model_folder(value: str) -> Path | None:
    """Return where the weights of ``NAME=FOLDER``, a folder or a bundled model lie; ``None`` if not on this machine."""
    _, separator, path = value.partition("=")
    folder = BUNDLED / value if is_bundled(value) else Path(path if separator else value).expanduser()
    return folder.absolute() if (folder / "config.json").is_file() else None


def require_model_folder(value: str, setting: str) -> Path:
    """The same where there has to be one. Raises ``ConfigError``."""
    folder = find_model_folder(value)
    if folder is None:
        names = ", ".join(sorted(child.parent.name for child in BUNDLED.glob("*/config.json"))) or "none"
        raise ConfigError(
            f"{setting}: {value!r} is neither a bundled model (here: {names}) nor a Hugging Face model folder, "
            "which holds config.json and *.safetensors"
        )
    return folder


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address(url: str, schemes: tuple[str, ...]) -> str:
    """The address itself. Raises ``ValueError`` for one that cannot be."""
    if not url.startswith(schemes):
        raise ValueError(f"must start with one of {', '.join(schemes)}")
    _ = urlsplit(url).port  # raises for a port or an address that cannot be
    return url
