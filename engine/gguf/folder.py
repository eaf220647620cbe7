"""Present a GGUF model as a Hugging Face folder: JSON files in a cache, and the weights where they are.

Everything that reads a checkpoint's configuration, tokenizer or chat template then needs to know one layout only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from engine.gguf.config import config_fields, generation_fields
from engine.gguf.file import read_gguf, refuse_wrong_types
from engine.gguf.paths import find_gguf_files, is_gguf
from engine.gguf.template_check import check_template
from engine.gguf.tokenizer import build_tokenizer, tokenizer_settings
from engine.protocol.types import EngineError

_VERSION = 5
"""Part of a folder's name; to be raised when the files' content changes."""
TEMPLATE = "chat_template.jinja"
"""File beside a GGUF file with a chat template, which counts more than the file's own."""
WEIGHTS = "weights.json"
"""File with the paths of the GGUF files."""


def open_checkpoint(path: Path) -> Path:
    """Return the Hugging Face folder of a model: the path itself, or the folder that presents a GGUF model."""
    return open_gguf_folder(path) if is_gguf(path) else path


def open_gguf_folder(path: Path) -> Path:
    """Return the folder for a GGUF model, made once for each state of the file.

    ``path``: a file, its first split, or a folder that holds one model. Raises ``EngineError`` naming what is wrong.
    """
    paths = [file.absolute() for file in find_gguf_files(path)]  # a link has its own neighbours, such as a probe
    beside = paths[0].with_name(TEMPLATE)
    states = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns)
        for file in (*paths, *([beside] if beside.is_file() else []))
    ]
    digest = hashlib.blake2b(json.dumps([_VERSION, states]).encode(), digest_size=10).hexdigest()
    folder = _find_cache() / f"{paths[0].stem}-{digest}"
    if folder.is_dir():
        return folder
    model = read_gguf(path)
    fields, tokenizer = config_fields(model), build_tokenizer(model)
    with refuse_wrong_types(paths[0]):
        settings, generation = tokenizer_settings(model), generation_fields(model)
    if beside.is_file():
        settings["chat_template"] = _read_template(beside)
    if (template := settings.get("chat_template")) is not None:
        own = f"{paths[0]}: the field tokenizer.chat_template"
        check_template(template, f"{beside}: it" if beside.is_file() else own)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        made = Path(parent) / "made"
        made.mkdir()
        tokenizer.save(str(made / "tokenizer.json"), pretty=False)
        for name, content in (
            ("config.json", fields),
            ("generation_config.json", generation),
            ("tokenizer_config.json", settings),
            (WEIGHTS, [str(file) for file in paths]),
        ):
            (made / name).write_text(json.dumps(content), encoding="utf-8")
        try:
            made.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # another process may have made the same
                raise EngineError(f"{folder} cannot be made: {error}") from None
    return folder


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read as a chat template: {error}") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the GGUF files that a folder presents; none for any other checkpoint."""
    file = folder / WEIGHTS
    return [Path(path) for path in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def _find_cache() -> Path:
    """Return ``$XDG_CACHE_HOME/reasoner/gguf``, or a folder of this user's alone where that cannot be written."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reasoner" / "gguf"
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    other = Path(tempfile.gettempdir()) / f"reasoner-gguf-{os.getuid()}"
    other.mkdir(mode=0o700, exist_ok=True)
    if other.is_symlink() or other.stat().st_uid != os.getuid():
        raise EngineError(f"{root} cannot be written, and {other} is not this user's: set XDG_CACHE_HOME")
    return other
