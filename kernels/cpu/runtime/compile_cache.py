"""The folder in which compiled kernels are kept between runs, so that a start takes one second instead of twenty."""

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
    """Return the first folder that can be written to, or ``None`` after a warning if there is none.

    Candidates are ``NUMBA_CACHE_DIR`` alone if it is set, else a folder beside the sources and then one in the user's
    cache. Each state of the sources has a folder of its own: numba compiles a kernel again if its own file changes, but
    not if a function in another file changes that the kernel calls.
    """
    state = sha256(b"".join(map(Path.read_bytes, sorted(sources.rglob("*.py"))))).hexdigest()[:16]
    candidates = list(_iterate_candidates(environ, sources))
    for folder in candidates:
        if _is_writable(folder / state):
            return folder / state
    _log.warning(
        "cannot write to %s: kernels are compiled in memory, which takes 20 seconds at every start; "
        "set NUMBA_CACHE_DIR to a folder that can be written to",
        " or ".join(map(str, candidates)),
    )
    return None


def _iterate_candidates(environ: Mapping[str, str], sources: Path) -> Iterator[Path]:
    if chosen := environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen).absolute()
        return
    yield sources / "__pycache__"
    # Only a folder of the user's own, because the code in it is executed.
    own = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/") / ".cache")
    if own.is_absolute() and own != Path("/.cache"):
        yield own / "reasoner" / "kernels"


def _is_writable(folder: Path) -> bool:
    """Return True if a file can be written. It is tried because root has all permissions, even on a read-only file
    system.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
