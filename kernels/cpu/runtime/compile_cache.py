"""The folder in which compiled kernels are kept between runs, so that a start takes a second and not twenty."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

SOURCES = Path(__file__).parents[1]

_log = logging.getLogger(__name__)


def find_cache(environ: Mapping[str, str] = os.environ, sources: Path = SOURCES) -> Path | None:
    """Return the first folder that can be written to: ``NUMBA_CACHE_DIR`` alone if it is set, else the one beside the
    sources, else the user's cache. ``None``, and a warning that says what would help, where there is none.

    Each state of the sources has a folder of its own: numba compiles a kernel again when its file changed, but it must
    also when a function changed that the kernel calls.
    """
    state = sha256(b"".join(map(Path.read_bytes, sorted(sources.rglob("*.py"))))).hexdigest()[:16]
    tried = list(_places(environ, sources))
    for place in tried:
        if _is_writable(place / state):
            return place / state
    _log.warning(
        "cannot write to %s: kernels are compiled in memory, which takes 20 seconds at every start; "
        "set NUMBA_CACHE_DIR to a folder that can be written to",
        " or ".join(map(str, tried)),
    )
    return None


def _places(environ: Mapping[str, str], sources: Path) -> Iterator[Path]:
    if chosen := environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen).absolute()
        return
    yield sources / "__pycache__"
    # Only a folder of the user's own: what lies in it is run.
    own = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/") / ".cache")
    if own.is_absolute() and own != Path("/.cache"):
        yield own / "reasoner" / "kernels"


def _is_writable(folder: Path) -> bool:
    """Permissions do not tell: root has them all, on a file system that is read-only too."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
