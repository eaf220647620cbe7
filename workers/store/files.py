"""Files of clients: their records in Redis, their bytes in a folder that all API processes share.

The bytes are stored under the file's id before it is recorded, and removed after its record: a record always has its
bytes. Bytes without a record are left over from a process that was killed, or that does not know whether it recorded
them, since the broker's answer was lost; they are removed after a day.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore

FileDocument = dict[str, Any]
"""A file in OpenAI's format."""
LEFTOVER_SECONDS = 86_400.0
"""Age at which bytes without a record are removed: far longer than an upload takes."""
ARRIVAL_SECONDS = 3600.0
"""Time after which the room of an upload is no longer reserved, as its process was killed."""
_MAX_EXPIRED = 100


class NoSuchFile(Exception):
    """There is no file with this id."""


class FileInUse(Exception):
    """An unfinished batch reads the file."""


class StorageFull(Exception):
    """The owner's files have the maximum number of bytes."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file whose bytes are stored under its id."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    keep_seconds: float | None
    """Seconds for which it is kept; ``None``: until it is deleted."""


class FileStore:
    """The files of a ``JobStore``."""

    def __init__(self, store: JobStore, folder: Path) -> None:
        self._store = store
        self._folder = folder

    def get_path(self, file_id: str) -> Path:
        """Return the path of a file's bytes, in a folder that exists."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._folder / file_id

    @asynccontextmanager
    async def reserve_room(
        self, owner: str, file_id: str, num_bytes: int | None, *, most: int, cap: int
    ) -> AsyncIterator[int]:
        """Reserve room for the bytes of an upload while they arrive; yield how many may.

        ``num_bytes``: ``None`` if the number is not known, which may then be up to ``most``. Raises ``StorageFull`` if
        the owner's files and uploads would have more than ``cap`` bytes.
        """
        wanted = "" if num_bytes is None else num_bytes
        outcome, number = await self._store.script(
            "file_arrive", owner, file_id, wanted, most, cap, round(ARRIVAL_SECONDS * 1000)
        )
        if outcome == "full":
            raise _storage_full(int(number), cap)
        try:
            yield int(number)
        finally:
            with contextlib.suppress(*BROKER_DOWN):  # it ends by itself, later
                await self._store.script("file_arrived", owner, file_id, number)

    async def record(self, file: StoredFile, cap: int) -> FileDocument:
        """Make a stored file visible.

        Raises ``StorageFull`` if its owner's would have more than ``cap`` bytes, and removes its bytes. Where anything
        else fails they stay, since the file may be recorded.
        """
        keep = "" if file.keep_seconds is None else round(file.keep_seconds * 1000)
        arguments = (file.id, file.owner, file.filename, file.purpose, file.num_bytes, keep, cap)
        outcome, *total = await self._store.script("file_record", *arguments)
        if outcome == "full":
            await self.remove_bytes(file.id)
            raise _storage_full(int(total[0]), cap)
        return await self.get(file.id)

    async def remove_bytes(self, file_id: str) -> None:
        """Remove the bytes of a file that is not recorded."""
        await asyncio.to_thread(self.get_path(file_id).unlink, missing_ok=True)

    async def check_owner(self, file_id: str, owner: str | None) -> None:
        """Raise ``NoSuchFile`` for a file of another owner, as ``JobStore.check_owner`` does for jobs."""
        if owner is not None and await self._store.command("HGET", _file_key(file_id), "owner") != owner:
            raise NoSuchFile(file_id)

    async def get(self, file_id: str) -> FileDocument:
        """Return the file. Raises ``NoSuchFile``."""
        fields = await self._store.command("HGETALL", _file_key(file_id))
        if not fields:
            raise NoSuchFile(file_id)
        return _build_document(fields)

    async def list_files(
        self, *, owner: str | None, purpose: str | None, after: str | None, limit: int, order: str
    ) -> list[FileDocument]:
        """Return files in the order ``asc`` or ``desc`` of their creation, beginning behind the file ``after``.

        ``owner=None`` returns those of all owners. Raises ``NoSuchFile`` if there is no file ``after``.
        """
        rows = await self._store.script("file_list", owner or "", purpose or "", after or "", limit, order)
        if rows is None:
            raise NoSuchFile(after)
        return [_build_document(dict(zip(row[::2], row[1::2], strict=True))) for row in rows]

    async def delete(self, file_id: str) -> None:
        """Delete a file. Raises ``NoSuchFile``, ``FileInUse``."""
        outcome = await self._store.script("file_delete", file_id)
        if outcome == "gone":
            raise NoSuchFile(file_id)
        if outcome == "used":
            raise FileInUse(file_id)
        await self.remove_bytes(file_id)

    async def expire(self) -> int:
        """Delete some of the files whose time is over. Return their number."""
        gone: list[str] = await self._store.script("file_expired", _MAX_EXPIRED)
        for file_id in gone:
            await self.remove_bytes(file_id)
        return len(gone)

    async def remove_leftovers(self) -> None:
        """Remove old bytes without a record, of processes that were killed."""
        for path in await asyncio.to_thread(list, self._list_old_paths()):
            kind = "batch" if path.name.startswith("batch_") else "file"
            if not await self._store.command("EXISTS", f"reasoner:{kind}:{path.name}"):
                await asyncio.to_thread(_remove, path)

    def _list_old_paths(self) -> Iterator[Path]:
        oldest = time.time() - LEFTOVER_SECONDS
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            if path.name.startswith(("file-", "batch_")) and path.stat().st_mtime < oldest:
                yield path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _file_key(file_id: str) -> str:
    return f"reasoner:file:{file_id}"


def _storage_full(total: int, cap: int) -> StorageFull:
    return StorageFull(f"your files have {total} bytes, and the limit is {cap}: delete some of them")


def _build_document(fields: dict[str, str]) -> FileDocument:
    return {
        "id": fields["id"],
        "object": "file",
        "bytes": int(fields["bytes"]),
        "created_at": int(float(fields["created"])),
        "expires_at": int(float(fields["expires"])) if "expires" in fields else None,
        "filename": fields["filename"],
        "purpose": fields["purpose"],
        "status": "processed",
        "status_details": None,
    }
