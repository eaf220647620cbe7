"""Access to the archive from one event loop: saving, reading, listing and deleting jobs that have ended."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Select, delete, event, func, insert, literal, make_url, or_, select, text, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from workers.archive.errors import ArchiveDown
from workers.archive.filters import JobFilter
from workers.archive.record import JobRecord, LogEntry, decompress, render_digests
from workers.archive.search import select_filtered
from workers.archive.tables import JOBS, JOURNALS, LAST_PASS, PAIRS, WORDS

TIMEOUT_SECONDS: Final = 10.0
"""The longest time that one transaction may take."""
_CONNECT_SECONDS: Final = 3
_BUSY_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.02
_POOL: Final = {"pool_size": 4, "max_overflow": 4, "pool_timeout": 3.0}


class Archive:
    """One event loop's connections. Every method raises ``ArchiveDown`` when the database cannot be used."""

    def __init__(self, url: str) -> None:
        """Create the pool without connecting. ``url``: ``sqlite:///PATH`` or ``postgresql://USER:PASSWORD@HOST/NAME``."""
        address = make_url(url)
        self._is_sqlite = address.get_backend_name() == "sqlite"
        self._is_migrated = False
        self._migrating = asyncio.Lock()
        if self._is_sqlite:
            self._folder = Path(str(address.database)).parent
            arguments: dict[str, Any] = {"timeout": _BUSY_SECONDS}
            address = address.set(drivername="sqlite+aiosqlite")
        else:
            limit = round(TIMEOUT_SECONDS * 1000)
            options = f"-c statement_timeout={limit} -c idle_in_transaction_session_timeout={limit}"
            arguments = {"connect_timeout": _CONNECT_SECONDS, "options": options}
            address = address.set(drivername="postgresql+psycopg")
        self.engine = create_async_engine(
            address, connect_args=arguments, pool_pre_ping=not self._is_sqlite, hide_parameters=True, **_POOL
        )
        if self._is_sqlite:
            event.listen(self.engine.sync_engine, "connect", _set_pragmas)

    async def close(self) -> None:
        await self.engine.dispose()

    async def save(
        self, records: Sequence[JobRecord], stale: Collection[str] = (), *, number: int | None = None
    ) -> bool:
        """Store jobs, and remove those whose rows are ``stale``, in one transaction.

        A job that is stored already is replaced, unless that is a later end of it. ``number``: that of the pass which
        has read the jobs; returns False, and does nothing, if a later one has stored some.
        """
        ids = [record.id for record in records]
        numbers = [int(record.fields["n"]) for record in records]
        await asyncio.to_thread(lambda: [record.prepare() for record in records])
        async with self._begin() as connection:
            if self._is_sqlite:  # a transaction that begins by reading cannot write once another one has
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            if number is not None:
                later = update(LAST_PASS).where(LAST_PASS.c.number < number).values(number=number)
                if (await connection.execute(later)).rowcount == 0:
                    return False
            stored = await connection.execute(
                select(JOBS.c.n, JOBS.c.id, JOBS.c.seq).where(or_(JOBS.c.id.in_([*ids, *stale]), JOBS.c.n.in_(numbers)))
            )
            rows = {row.id: (row.n, row.seq) for row in stored}
            taken = {n: job_id for job_id, (n, _) in rows.items()}
            next_free: int | None = None
            obsolete = [rows[job_id][0] for job_id in stale if job_id in rows]
            saved: list[tuple[int, JobRecord]] = []
            for record in records:
                n = int(record.fields["n"])
                if record.id in rows:
                    n, seq = rows[record.id]
                    if seq > int(record.fields["seq"]):
                        continue
                    obsolete.append(n)
                elif taken.get(n, record.id) != record.id:  # of jobs from before Redis lost its data
                    if next_free is None:
                        next_free = int((await connection.execute(select(func.max(JOBS.c.n)))).scalar_one())
                    n = next_free = max(next_free, *numbers) + 1
                saved.append((n, record))
            await self._delete_rows(connection, obsolete)
            await self._insert_rows(connection, saved)
        return True

    async def _insert_rows(self, connection: AsyncConnection, saved: Sequence[tuple[int, JobRecord]]) -> None:
        if not saved:
            return
        await connection.execute(insert(JOBS), [record.row | {"n": n} for n, record in saved])
        await connection.execute(insert(JOURNALS), [{"n": n, "entries": record.entries_data} for n, record in saved])
        if pairs := [{"digest": digest, "n": n} for n, record in saved for digest in record.pairs]:
            await connection.execute(insert(PAIRS), pairs)
        if self._is_sqlite:
            texts = [{"n": n, "words": render_digests(record.words)} for n, record in saved]
            await connection.execute(text("INSERT INTO job_words (rowid, words) VALUES (:n, :words)"), texts)
        else:
            await connection.execute(insert(WORDS), [{"n": n, "words": record.words} for n, record in saved])

    async def _delete_rows(self, connection: AsyncConnection, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        for table in (JOBS, JOURNALS, PAIRS):
            await connection.execute(delete(table).where(table.c.n.in_(numbers)))
        if self._is_sqlite:
            rows = [{"n": n} for n in numbers]
            await connection.execute(text("DELETE FROM job_words WHERE rowid = :n"), rows)
        else:
            await connection.execute(delete(WORDS).where(WORDS.c.n.in_(numbers)))

    async def delete(self, ids: Collection[str]) -> None:
        """Remove jobs, as far as they are there."""
        await self.save((), ids)

    async def check(self) -> None:
        """Raise ``ArchiveDown`` if the database cannot be used."""
        async with self._begin() as connection:
            await connection.execute(select(literal(1)))

    async def find_last_position(self) -> int:
        """Return the highest position of a job; 0 without any."""
        async with self._begin() as connection:
            return (await connection.execute(select(func.max(JOBS.c.n)))).scalar_one() or 0

    async def load_fields(self, ids: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the hashes of those jobs that are there, by their ids."""
        async with self._begin() as connection:
            rows = await connection.execute(select(JOBS.c.fields).where(JOBS.c.id.in_(ids)))
            return {fields["id"]: fields for fields in (decompress(row.fields) for row in rows)}

    async def load_entries(self, job_id: str) -> list[LogEntry] | None:
        """Return the stream of a job; ``None`` if it is not there."""
        query = select(JOURNALS.c.entries).join(JOBS, JOBS.c.n == JOURNALS.c.n).where(JOBS.c.id == job_id)
        async with self._begin() as connection:
            data = (await connection.execute(query)).scalar_one_or_none()
        return None if data is None else [(entry_id, fields) for entry_id, fields in decompress(data)]

    async def find_position(self, job_id: str, owner: str | None) -> int | None:
        """Return a job's position in the order of submission; ``None`` if it is not there, or of another owner."""
        query = select(JOBS.c.n).where(JOBS.c.id == job_id)
        query = query if owner is None else query.where(JOBS.c.owner == owner)
        async with self._begin() as connection:
            n: int | None = (await connection.execute(query)).scalar_one_or_none()
        return n

    async def list_jobs(
        self, wanted: JobFilter, *, owner: str | None, before: int | None, limit: int
    ) -> list[tuple[int, dict[str, str]]]:
        """Return the positions and hashes of jobs from newest to oldest, behind the position ``before``."""
        async with self._begin() as connection:
            query = await select_filtered(connection, wanted, owner=owner, before=before, limit=limit)
            rows = (await connection.execute(query)).all()
        return [(row.n, decompress(row.fields)) for row in rows]

    async def list_ended(
        self, owner: str | None, after: tuple[int, str], highest: int, limit: int
    ) -> list[tuple[int, str]]:
        """Return the times (ms) of ends with the jobs' ids, in their order, behind ``after`` and up to ``highest``."""
        query: Select[Any] = select(JOBS.c.finished_ms, JOBS.c.id).where(
            JOBS.c.finished_ms >= after[0],
            JOBS.c.finished_ms <= highest,
            or_(JOBS.c.finished_ms > after[0], JOBS.c.id > after[1]),
        )
        query = query if owner is None else query.where(JOBS.c.owner == owner)
        query = query.order_by(JOBS.c.finished_ms, JOBS.c.id).limit(limit)
        async with self._begin() as connection:
            return [(row.finished_ms, row.id) for row in await connection.execute(query)]

    async def list_expired(self, before_ms: int, limit: int) -> list[dict[str, str]]:
        """Return the hashes of some of the jobs that ended before a time."""
        query = select(JOBS.c.fields).where(JOBS.c.finished_ms < before_ms).order_by(JOBS.c.finished_ms).limit(limit)
        async with self._begin() as connection:
            return [decompress(row.fields) for row in await connection.execute(query)]

    @contextlib.asynccontextmanager
    async def _begin(self) -> AsyncIterator[AsyncConnection]:
        """Yield a connection in a transaction."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._migrate()
                async with self.engine.begin() as connection:
                    yield connection
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            raise ArchiveDown(_describe(error)) from error

    async def _migrate(self) -> None:
        """Bring the database up to date, once."""
        async with self._migrating:
            if self._is_migrated:
                return
            from workers.archive.migrate import migrate  # Alembic takes a quarter of a second

            if self._is_sqlite:
                await asyncio.to_thread(self._folder.mkdir, mode=0o700, parents=True, exist_ok=True)
            async with self.engine.begin() as connection:
                await connection.run_sync(migrate)
            self._is_migrated = True


def _set_pragmas(connection: Any, _record: Any) -> None:
    """Let readers go on beside a writer, and keep what is committed even if the power fails."""
    connection.run_async(_use_write_ahead_log)
    connection.execute("PRAGMA synchronous = FULL").close()


async def _use_write_ahead_log(connection: Any) -> None:
    """Try until it succeeds: SQLite does not wait by itself while another process changes a new database likewise."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            await connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return


def _describe(error: Exception) -> str:
    """Return an error of the database in a line, without statements and their values."""
    if isinstance(error, TimeoutError):
        return f"the database does not answer within {TIMEOUT_SECONDS:g} s"
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()) or type(cause).__name__
