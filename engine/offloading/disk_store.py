"""Records in files, written by a thread of its own in groups of some MiB, of which the least recently used goes first.

The engine's thread alone knows what is where; the writer gets bytes and a path, and says when the file is whole. Until
then the bytes can be read from memory. After a file that could not be written, nothing is written any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from engine.offloading.record_file import measure_record, write_records
from engine.offloading.records import FileGroup, Record, RecordName
from engine.offloading.run_folder import RunFolder
from engine.offloading.stats import OffloadingStats

_log = logging.getLogger(__name__)

GROUP_BYTES = 4 << 20
"""Size from which a group of records is written, unless the writer has nothing else to do before."""
CLOSE_SECONDS = 5.0
"""Time after which a writer that a disk keeps waiting is left behind."""
MAX_QUEUED_BYTES = 128 << 20
"""Bytes that may wait to be written; beyond it records are dropped."""
_MAX_QUEUED_GROUPS = 1024


class _Written(NamedTuple):
    """A group that the writer is done with."""

    group: FileGroup
    seconds: float
    error: Exception | None


class DiskStore:
    """Files of at most ``max_bytes`` in all. ``on_lost``: receiver of a record that has lost its place here."""

    def __init__(
        self,
        folder: RunFolder,
        layout: bytes,
        max_bytes: int,
        stats: OffloadingStats,
        on_lost: Callable[[Record], None],
    ) -> None:
        self.layout = layout
        self.failure: str | None = None
        """Reason why nothing is written any more."""
        self._folder, self._max_bytes, self._stats, self._on_lost = folder, max_bytes, stats, on_lost
        self._groups: dict[FileGroup, None] = {}
        """All groups, least recently used first."""
        self._open: FileGroup | None = None
        self._num_groups = self._num_bytes = self._queued_bytes = 0
        self._queue: queue.Queue[tuple[FileGroup, list[tuple[RecordName, Tensor]]] | None] = queue.Queue(
            _MAX_QUEUED_GROUPS
        )
        self._written: deque[_Written] = deque()  # at most as many as groups in the queue
        self._writer = threading.Thread(target=self._write_groups, name="cache writer", daemon=True)
        self._writer.start()

    @property
    def num_used_bytes(self) -> int:
        return self._num_bytes

    def put(self, record: Record, data: Tensor) -> bool:
        """Queue the bytes of a record, on the host, for a file; return False if there is no room for it."""
        size = measure_record(record.name, len(data))
        if self.failure is not None or size > self._max_bytes or self._queued_bytes + size > MAX_QUEUED_BYTES:
            return False
        while self._num_bytes + size > self._max_bytes:
            oldest = next(iter(self._groups))
            self._drop_group(oldest)
        group = self._open
        if group is None:
            path = str(self._folder.path / f"{self._num_groups}.kv")
            group = self._open = FileGroup(path, 0)
            self._groups[group] = None
            self._num_groups += 1
        record.group, record.offset, record.size, record.data = group, group.num_bytes, size, data
        group.records.add(record)
        group.num_bytes += size
        self._num_bytes += size
        self._queued_bytes += size
        if group.num_bytes >= GROUP_BYTES:
            self._submit()
        return True

    def poll(self) -> None:
        """Note what the writer has done, and give it what there is if it has nothing to do."""
        while self._written:
            self._finish(self._written.popleft())
        if self._open is not None and self._queue.empty():
            self._submit()

    def touch(self, record: Record) -> None:
        """Make the group of a record the last to leave."""
        if record.group is not None:
            self._groups[record.group] = self._groups.pop(record.group)

    def drop(self, record: Record) -> None:
        """Forget a record. Its file goes with the last one in it."""
        group, record.group, record.data = record.group, None, None
        if group is not None:
            group.records.discard(record)
            if not group.records:
                self._remove_group(group)

    def flush(self) -> None:
        """Wait until everything is written. For tests and measurements."""
        if self._open is not None:
            self._submit()
        self._queue.join()
        self.poll()

    def close(self) -> None:
        """Stop the writer, and remove all files."""
        while True:  # what still waits need not be written
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._queue.put(None)
        self._writer.join(CLOSE_SECONDS)
        self._folder.remove()

    def check(self) -> None:
        """Raise ``RuntimeError`` unless sizes add up and records and groups agree."""
        if sum(group.num_bytes for group in self._groups) != self._num_bytes or self._num_bytes > self._max_bytes:
            raise RuntimeError("the sizes of files do not add up, or are beyond the limit")
        for group in self._groups:
            if not group.records or any(record.group is not group for record in group.records):
                raise RuntimeError("a file has no records, or they are of another one")
            if any((record.data is None) != group.is_written for record in group.records):
                raise RuntimeError("a record that is not written has no bytes, or a written one has some")

    def _submit(self) -> None:
        group, self._open = self._open, None
        assert group is not None
        # A record that was dropped left a gap: offsets are those of the file as it will be written.
        records = sorted(group.records, key=lambda record: record.offset)
        offset = 0
        for record in records:
            record.offset, offset = offset, offset + record.size
        self._queued_bytes -= group.num_bytes - offset
        self._num_bytes -= group.num_bytes - offset
        group.num_bytes = offset
        contents = [(record.name, record.data) for record in records if record.data is not None]
        try:
            self._queue.put_nowait((group, contents))
        except queue.Full:
            self._queued_bytes -= group.num_bytes
            self._drop_group(group)

    def _finish(self, done: _Written) -> None:
        group = done.group
        self._queued_bytes -= group.num_bytes
        self._stats.write_seconds += done.seconds
        if group not in self._groups:  # dropped meanwhile
            Path(group.path).unlink(missing_ok=True)
        elif done.error is None:
            group.is_written = True
            for record in group.records:
                record.data = None
        else:
            self._drop_group(group)
        if done.error is not None:
            self._stats.write_failures += 1
            if self.failure is None:
                self.failure = getattr(done.error, "strerror", None) or repr(done.error)
                _log.error("the cache on disk is not written to any more: %s: %s", self._folder.path, self.failure)

    def _drop_group(self, group: FileGroup) -> None:
        records, group.records = group.records, set()
        for record in records:
            record.group = record.data = None
            self._on_lost(record)
        self._remove_group(group)

    def _remove_group(self, group: FileGroup) -> None:
        """Remove a group without records; one that is not written yet is removed when it is."""
        self._groups.pop(group)
        self._num_bytes -= group.num_bytes
        if group is self._open:
            self._open = None
            self._queued_bytes -= group.num_bytes
        elif group.is_written:
            Path(group.path).unlink(missing_ok=True)

    # The writer's thread.

    def _write_groups(self) -> None:
        while (item := self._queue.get()) is not None:
            group, contents = item
            started = time.perf_counter()
            error: Exception | None = None
            try:
                self._write(Path(group.path), contents)
            except Exception as failure:  # the engine's thread logs it
                error = failure
            self._written.append(_Written(group, time.perf_counter() - started, error))
            self._queue.task_done()

    def _write(self, path: Path, contents: list[tuple[RecordName, Tensor]]) -> None:
        write_records(path, self.layout, [(name, data.numpy()) for name, data in contents])
