"""The index of a lower tier: which pages and states it has, found by the tokens before them.

A record is named by the digest of all tokens before its page, and by its own tokens. Digests are chained from page to
page and begin with a secret of this process, the model and the namespace, so that nothing is shared between those.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from torch import Tensor

DIGEST_BYTES = 32


class RecordName(NamedTuple):
    """The identity of a page, or of the state after its last token."""

    parent: bytes
    """Digest of all tokens before the page."""
    is_state: bool
    tokens: bytes
    """Tokens of the page, or its first ones up to the state; see ``pack_tokens``."""


@dataclass(slots=True, eq=False)
class FileGroup:
    """Records in one file, which is dropped as a whole."""

    path: str
    num_bytes: int
    records: set[Record] = field(default_factory=set)
    is_written: bool = False


@dataclass(slots=True, eq=False)
class Record:
    """The bytes of a page or of a state, in one place or several."""

    name: RecordName
    claims: set[str]
    """Keys that may come back for it."""
    is_in_host_memory: bool = False
    group: FileGroup | None = None
    """The file that it is in, or will be."""
    data: Tensor | None = None
    """The bytes, until the file is written."""
    offset: int = 0
    """Bytes before it in the file."""
    size: int = 0
    """Bytes that it takes in the file."""
    num_readers: int = 0
    """Loads that will read it from the host store."""

    @property
    def is_stored(self) -> bool:
        return self.is_in_host_memory or self.group is not None


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens, which may carry an adapter's tag, as bytes that sort as they do."""
    return np.array(tokens, dtype=">u8").tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, dtype=">u8").tolist())


TOKEN_BYTES = 8
"""Bytes of a packed token."""


class DigestChain:
    """Digests of prefixes of whole pages."""

    def __init__(self, secret: bytes, layout: str) -> None:
        self._secret, self._layout = secret, layout.encode()

    def start(self, namespace: str | None) -> bytes:
        """Return the digest of no tokens of a namespace."""
        name = b"" if namespace is None else b"=" + namespace.encode(errors="surrogatepass")
        start = blake2b(self._layout, digest_size=DIGEST_BYTES, key=self._secret)
        return blake2b(start.digest() + name, digest_size=DIGEST_BYTES, key=self._secret).digest()

    def extend(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the digest after one more page."""
        return blake2b(parent + tokens, digest_size=DIGEST_BYTES, key=self._secret).digest()


class RecordIndex:
    """Records by name, by the page before them, and by claim."""

    def __init__(self) -> None:
        self.version = 0
        """Number of records added so far."""
        self._records: dict[RecordName, Record] = {}
        self._children: dict[bytes, list[bytes]] = {}
        """Tokens of the pages after each page, sorted: the longest common prefix is that of a neighbour."""
        self._claimed: dict[str, set[Record]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def __contains__(self, record: Record) -> bool:
        return self._records.get(record.name) is record

    def get(self, name: RecordName) -> Record | None:
        return self._records.get(name)

    def add(self, record: Record) -> None:
        """Add a record whose name is new."""
        name = record.name
        self.version += 1
        self._records[name] = record
        if not name.is_state:
            insort(self._children.setdefault(name.parent, []), name.tokens)
        claims, record.claims = record.claims, set()
        self.claim(record, claims)

    def claim(self, record: Record, claims: Collection[str]) -> None:
        for key in claims:
            record.claims.add(key)
            self._claimed.setdefault(key, set()).add(record)

    def remove(self, record: Record) -> None:
        name = record.name
        del self._records[name]
        if not name.is_state:
            children = self._children[name.parent]
            del children[bisect_left(children, name.tokens)]
            if not children:
                del self._children[name.parent]
        for key in record.claims:
            self._discard_claim(record, key)
        record.claims = set()

    def release(self, key: str) -> list[Record]:
        """Drop a key's claims; return the records that no other key claims."""
        records = self._claimed.pop(key, set())
        for record in records:
            record.claims.discard(key)
        return [record for record in records if not record.claims]

    def unclaim(self, record: Record, key: str) -> bool:
        """Drop a key's claim on one record; return True if no other key claims it."""
        if key in record.claims:
            record.claims.remove(key)
            self._discard_claim(record, key)
        return not record.claims

    def find_page(self, parent: bytes, tokens: bytes) -> Record | None:
        """Return the page after ``parent`` that shares the most first tokens with these, at least one."""
        children = self._children.get(parent)
        if not children:
            return None
        index = bisect_left(children, tokens)
        near = children[max(index - 1, 0) : index + 1]
        best = max(near, key=lambda other: count_common(other, tokens))
        return self._records[RecordName(parent, False, best)] if count_common(best, tokens) else None

    def list_pages(self, parent: bytes) -> list[Record]:
        """Return all pages after ``parent``."""
        return [self._records[RecordName(parent, False, tokens)] for tokens in self._children.get(parent, ())]

    def find_state(self, parent: bytes, tokens: bytes) -> Record | None:
        """Return the last state after one of the first of these tokens of a page."""
        for end in range(len(tokens), 0, -TOKEN_BYTES):
            record = self._records.get(RecordName(parent, True, tokens[:end]))
            if record is not None:
                return record
        return None

    def check(self) -> None:
        """Raise ``RuntimeError`` unless the look-ups agree with the records."""
        pages = sorted((name.parent, name.tokens) for name in self._records if not name.is_state)
        if pages != sorted((parent, tokens) for parent, some in self._children.items() for tokens in some):
            raise RuntimeError("the pages of a lower tier are not found by the pages before them")
        if any(some != sorted(some) for some in self._children.values()):
            raise RuntimeError("pages of a lower tier are not sorted")
        claims = {(key, record.name) for record in self._records.values() for key in record.claims}
        if claims != {(key, record.name) for key, records in self._claimed.items() for record in records}:
            raise RuntimeError("the claims on a lower tier do not agree with its records")
        if not all(self._claimed.values()):
            raise RuntimeError("a key without a record was kept")

    def _discard_claim(self, record: Record, key: str) -> None:
        records = self._claimed[key]
        records.discard(record)
        if not records:
            del self._claimed[key]


def count_common(left: bytes, right: bytes) -> int:
    """Return the number of first tokens that are equal."""
    if right.startswith(left):
        return len(left) // TOKEN_BYTES
    count = next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    return count // TOKEN_BYTES
