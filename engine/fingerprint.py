"""A short name for what a checkpoint holds, so that what was measured with one is not taken for another's."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

SAMPLE = 1 << 16
"""Bytes that are read at the start, in the middle and at the end of a file: enough to tell training runs apart, and
quick for a checkpoint of any size."""


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits from the names, sizes and samples of the weights' files and from all of config.json."""
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLE)):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()
