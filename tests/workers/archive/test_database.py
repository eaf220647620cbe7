"""The archive's database: its migrations, several processes at once, and one that cannot be used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

from tests.workers.archive.helpers import make_ended
from workers.archive.archive import Archive
from workers.archive.errors import ArchiveDown, ArchiveTooNew
from workers.archive.tables import METADATA
from workers.broker.archiver import Archiver
from workers.store.jobs import JobStore


async def test_the_migrations_make_the_tables_that_queries_use(archive: Archive) -> None:
    await archive.check()

    def list_differences(connection: Connection) -> list[str]:
        found = map(repr, compare_metadata(MigrationContext.configure(connection), METADATA))
        is_sqlite = connection.dialect.name == "sqlite"  # where the words are a virtual table
        return [item for item in found if "remove_index" not in item and not (is_sqlite and "job_words" in item)]

    async with archive.engine.connect() as connection:
        assert await connection.run_sync(list_differences) == []


async def test_processes_that_start_together_migrate_once(archive_url: str) -> None:
    archives = [Archive(archive_url) for _ in range(5)]
    await asyncio.gather(*(archive.check() for archive in archives))
    async with archives[0].engine.connect() as connection:
        rows = await connection.execute(text("SELECT version_num FROM alembic_version"))
        assert [row.version_num for row in rows] == ["number_passes"]
    for archive in archives:
        await archive.close()


async def test_a_database_of_a_newer_version_is_refused_and_both_migrations_are_named(
    archive: Archive, archive_url: str, store: JobStore
) -> None:
    await archive.check()
    async with archive.engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = 'from_the_future'"))
    older = Archive(archive_url)
    with pytest.raises(
        ArchiveTooNew, match="'from_the_future' of a newer version, and this version's newest is 'number_passes'"
    ):
        await older.check()
    archiver = Archiver(store, older, age=0, retention=1e6)
    await make_ended(store)
    await archiver._move_and_report()
    assert "from_the_future" in archiver.outage
    await older.close()


async def test_a_file_that_is_no_database_is_an_outage_that_ends_with_its_cause(tmp_path: Path) -> None:
    path = tmp_path / "archive.sqlite3"
    path.write_text("not a database, but long enough to look at" * 100)
    archive = Archive(f"sqlite:///{path}")
    with pytest.raises(ArchiveDown) as outage:
        await archive.check()
    assert "not a database" in outage.value.reason
    path.unlink()
    await archive.check()
    await archive.close()


async def test_a_job_that_was_read_earlier_does_not_replace_its_later_end(store: JobStore, archive: Archive) -> None:
    job_id = await make_ended(store, "failed")
    early = await store.read_record(job_id)
    assert early is not None
    late = type(early)(early.fields | {"seq": str(int(early.fields["seq"]) + 1), "status": "completed"}, early.entries)
    await archive.save([late])
    await archive.save([early])
    assert (await archive.load_fields([job_id]))[job_id] == late.fields
