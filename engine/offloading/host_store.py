"""Records in host memory, beside a GPU whose cache they come from.

Copies to the host run on a stream of their own behind what the engine's stream has gathered, so that steps do not wait
for them. On a CPU the same code copies from memory to memory; tests run it so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.offloading.records import Record


class HostStore:
    """Rows of host memory, of which a record takes as many as it needs. The least recently used goes first."""

    def __init__(
        self, max_bytes: int, row_bytes: int, device: torch.device, on_evict: Callable[[Record], None]
    ) -> None:
        """``on_evict``: receiver of a record that leaves for lack of room, while it can still be read."""
        is_cuda = device.type == "cuda"
        self.row_bytes, self._device, self._on_evict = row_bytes, device, on_evict
        self._rows = torch.empty((max_bytes // row_bytes, row_bytes), dtype=torch.uint8, pin_memory=is_cuda)
        self._free = list(range(len(self._rows)))
        self._records: dict[Record, tuple[int, ...]] = {}
        """Rows of each record, least recently used first."""
        self._sizes: dict[Record, int] = {}
        self._copied: dict[Record, torch.cuda.Event] = {}
        """Ends of copies that the host has not waited for."""
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def num_used_bytes(self) -> int:
        return (len(self._rows) - len(self._free)) * self.row_bytes

    def put(self, record: Record, data: Tensor) -> bool:
        """Copy the bytes of a record from the device; return False if there is no room for it."""
        needed = max(1, -(-len(data) // self.row_bytes))
        while len(self._free) < needed:
            oldest = next((one for one in self._records if not one.num_readers), None)
            if oldest is None:
                return False
            self._on_evict(oldest)
            self.drop(oldest)
        rows = tuple(self._free.pop() for _ in range(needed))
        self._records[record], self._sizes[record] = rows, len(data)
        record.is_in_host_memory = True
        if self._stream is None:
            self._copy(rows, data)
            return True
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy(rows, data)
            self._copied[record] = self._stream.record_event()
        data.record_stream(self._stream)
        return True

    def read(self, record: Record) -> Tensor:
        """Return a copy of a record's bytes on the device, in the order of the current stream."""
        event = self._copied.get(record)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        data = torch.empty(self._sizes[record], dtype=torch.uint8, device=self._device)
        for row, part in self._cut(self._records[record], data):
            part.copy_(self._rows[row, : len(part)], non_blocking=True)
        return data

    def read_on_host(self, record: Record) -> Tensor:
        """Return a copy of a record's bytes on the host, once they are there."""
        event = self._copied.pop(record, None)
        if event is not None:
            event.synchronize()
        parts = [self._rows[row] for row in self._records[record]]
        return torch.cat(parts)[: self._sizes[record]]

    def touch(self, record: Record) -> None:
        """Make a record the last to leave."""
        self._records[record] = self._records.pop(record)

    def drop(self, record: Record) -> None:
        """Free the rows of a record."""
        self._free += self._records.pop(record)
        del self._sizes[record]
        self._copied.pop(record, None)
        record.is_in_host_memory = False

    def check(self) -> None:
        """Raise ``RuntimeError`` unless every row is free or of one record."""
        used = [row for rows in self._records.values() for row in rows]
        if sorted(used + self._free) != list(range(len(self._rows))):
            raise RuntimeError("rows of host memory are lost, or of two records")

    def __contains__(self, record: Record) -> bool:
        return record in self._records

    def _copy(self, rows: tuple[int, ...], data: Tensor) -> None:
        for row, part in self._cut(rows, data):
            self._rows[row, : len(part)].copy_(part, non_blocking=True)

    def _cut(self, rows: tuple[int, ...], data: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each row with its part of a record's bytes."""
        for index, row in enumerate(rows):
            yield row, data[index * self.row_bytes : (index + 1) * self.row_bytes]
