"""Bringing the archive's database up to date, by one process at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text

from workers.archive.errors import ArchiveTooNew

_FOLDER: Final = Path(__file__).parent / "migrations"
_LOCK_ID: Final = 0x7265_6173_6F6E_6572 >> 1
"""The number of PostgreSQL's advisory lock: a bigint that nothing else of the database should use."""


def migrate(connection: Connection) -> None:
    """Apply the migrations that the database lacks, in the connection's transaction. Raises ``ArchiveTooNew``."""
    # Until the transaction ends, every other process waits here.
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": _LOCK_ID})
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    script = ScriptDirectory(str(_FOLDER), version_locations=[str(_FOLDER)])

    def list_steps(current: Any, _context: MigrationContext) -> Any:
        return script._upgrade_revs("head", current)

    options = {"fn": list_steps, "script": script, "transactional_ddl": True}
    context = MigrationContext.configure(connection, opts=options)
    for found in context.get_current_heads():
        try:
            script.get_revision(found)
        except CommandError:
            raise ArchiveTooNew(found, str(script.get_current_head())) from None
    with Operations.context(context):
        context.run_migrations()
