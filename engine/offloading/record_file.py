"""The format of the files of a lower tier: records one after the other, each with a header of its own.

```
magic   layout   parent   kind   tokens   bytes   checksum | tokens      | data
8       32       32       1      4        8       32       | 8 each      | ...
```

``layout`` stands for the model, its weights, the dtype of its cache and the shapes and size of its pages; ``parent`` is
the digest of all tokens before the page; the checksum covers everything else. Numbers are little-endian. A file is
written under another name and renamed once it is whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.offloading.records import DIGEST_BYTES, RecordName

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"RKVPAGE1"
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}sBIQ")
HEADER_BYTES = _HEADER.size + DIGEST_BYTES


class RecordLost(Exception):
    """A record cannot be read: its file is missing or damaged, or is not that of the record."""


class StoredRecord(NamedTuple):
    """A record and its place in a file."""

    name: RecordName
    offset: int
    size: int


def measure_record(name: RecordName, num_bytes: int) -> int:
    """Return the bytes that a record takes in a file."""
    return HEADER_BYTES + len(name.tokens) + num_bytes


def write_records(path: Path, layout: bytes, records: Sequence[tuple[RecordName, Bytes]]) -> None:
    """Write a file of records. Raises ``OSError``, and leaves nothing behind then."""
    partial = path.with_suffix(".part")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            for name, data in records:
                for part in (_build_header(layout, name, data), name.tokens, data):
                    _write_all(file.fileno(), part)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_records(path: Path, layout: bytes, records: Sequence[StoredRecord]) -> list[Bytes | RecordLost]:
    """Return the data of some records of a file, or the reason why it is lost, each."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        return [RecordLost(f"{path.name}: {error.strerror}") for _ in records]
    try:
        return [_read_record(descriptor, path, layout, record) for record in records]
    finally:
        os.close(descriptor)


def _read_record(descriptor: int, path: Path, layout: bytes, record: StoredRecord) -> Bytes | RecordLost:
    whole: Bytes = np.empty(record.size, np.uint8)
    try:
        count = _read_all(descriptor, whole, record.offset)
    except OSError as error:
        return RecordLost(f"{path.name}: {error.strerror}")
    if count < record.size:
        return RecordLost(f"{path.name} is shorter than it was written")
    start = HEADER_BYTES + len(record.name.tokens)
    data = whole[start:]
    if whole[:start].tobytes() != _build_header(layout, record.name, data) + record.name.tokens:
        return RecordLost(f"{path.name} is damaged, or of another model or prefix")
    return data


def _build_header(layout: bytes, name: RecordName, data: bytes | Bytes) -> bytes:
    header = _HEADER.pack(_MAGIC, layout, name.parent, name.is_state, len(name.tokens), len(data))
    checksum = blake2b(header, digest_size=DIGEST_BYTES)
    checksum.update(name.tokens)
    checksum.update(_view(data))
    return header + checksum.digest()


def _write_all(descriptor: int, data: bytes | Bytes) -> None:
    left = _view(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _read_all(descriptor: int, target: Bytes, offset: int) -> int:
    """Fill an array from a file; return the number of bytes that there were."""
    left, count = _view(target), 0
    while left:
        size = os.preadv(descriptor, [left], offset + count)
        if not size:
            break
        left, count = left[size:], count + size
    return count


def _view(data: bytes | Bytes) -> memoryview:
    return memoryview(data)  # type: ignore[arg-type]  # an array has a buffer, which its type does not say
