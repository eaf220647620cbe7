"""Errors of an archive that cannot be used. Importing them loads no database library."""

from __future__ import annotations


class ArchiveDown(Exception):
    """The archive cannot be used now. The message is for clients: without an address; ``reason`` is for the log."""

    retry_after = 5
    """Seconds after which a client may try again."""

    def __init__(self, reason: str, message: str = "the archive of ended jobs cannot be reached") -> None:
        super().__init__(message)
        self.reason = reason


class ArchiveTooNew(ArchiveDown):
    """A newer version of the service has migrated the database."""

    def __init__(self, found: str, known: str) -> None:
        """``found``: the database's migration. ``known``: the newest of this version."""
        message = (
            f"the archive's database has the migration {found!r} of a newer version, and this version's newest is "
            f"{known!r}: run the newer version, or give this one a database of its own"
        )
        super().__init__(message, message)
