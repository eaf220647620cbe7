"""Fingerprint of a checkpoint, so that measurements of one are not applied to another."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

SAMPLE_BYTES = 1 << 16
"""Bytes read at the start, in the middle and at the end of a file: enough to tell training runs apart, and fast for a
checkpoint of any size."""


def fingerprint(folder: Path, weights: Sequence[Path] = (), config: str = "config.json") -> str:
    """Return 16 hexadecimal digits: a hash of ``config`` and of the names, sizes and samples of the weights' files.

    ``weights``: files outside of the folder, in GGUF; their users name them, so that only their order counts.
    """
    digest = blake2b((folder / config).read_bytes(), digest_size=8)
    for path in sorted([*folder.glob("*.safetensors"), *weights]):
        size = path.stat().st_size
        digest.update(f"{'' if path in weights else path.name}:{size}".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
