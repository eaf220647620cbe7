"""Find the files of a GGUF model."""

from __future__ import annotations

import re
from pathlib import Path

from engine.protocol.types import EngineError

_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file, and for a folder that holds one and no ``config.json``."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf"


def find_gguf_files(path: Path) -> tuple[Path, ...]:
    """Return the file, or all splits of a model, from a file, a first split, or a folder that holds one model.

    Raises ``EngineError`` if a split is missing or a folder holds several models.
    """
    if path.is_dir():
        first = [file for file in sorted(path.glob("*.gguf")) if _split_number(file) in (None, 1)]
        if len(first) != 1:
            names = ", ".join(file.name for file in first) or "none"
            raise EngineError(f"{path} must hold one GGUF model, but has {names}; give the path of the file")
        path = first[0]
    if not path.is_file():
        raise EngineError(f"{path} does not exist; give a GGUF file, its first split, or a folder with one")
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, number, count = match[1], int(match[2]), int(match[3])
    if number != 1:
        raise EngineError(f"{path} is split {number} of {count}; give the first, {stem}-00001-of-{count:05}.gguf")
    paths = tuple(path.with_name(f"{stem}-{index:05}-of-{count:05}.gguf") for index in range(1, count + 1))
    if missing := [split.name for split in paths if not split.is_file()]:
        raise EngineError(f"{path.parent} lacks {', '.join(missing[:3])}: the model has {count} splits")
    return paths


def _split_number(path: Path) -> int | None:
    match = _SPLIT_NAME.fullmatch(path.name)
    return int(match[2]) if match else None
