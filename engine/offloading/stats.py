"""Statistics of a lower tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OffloadingStats:
    """Counts since the start. Pages are those of keys and values, and states, which count as one page each."""

    pages_written: int = 0
    """Pages that were copied to host memory or written to disk."""
    pages_loaded: int = 0
    """Pages that came back into the cache."""
    pages_dropped: int = 0
    """Pages that had no room, or lost it to newer ones, although a search might have come back for them."""
    pages_lost: int = 0
    """Pages whose file was missing, damaged or not ours: they are computed again."""
    bytes_written: int = 0
    bytes_loaded: int = 0
    write_seconds: float = 0.0
    """Time of the thread that writes files."""
    load_seconds: float = 0.0
    """Time of the thread that reads files, and of copies into the cache."""
    write_failures: int = 0
    """Files that could not be written; after the first one nothing is written any more."""
    loads_skipped: int = 0
    """Cached prefixes that were computed, since loading them would have taken longer."""
    tokens_loaded: int = 0
    """Tokens that did not have to be computed."""
    host_bytes: int = 0
    """Bytes in host memory now."""
    disk_bytes: int = 0
    """Bytes on disk now, those that wait to be written included."""
