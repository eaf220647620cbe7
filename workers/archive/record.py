"""A job as it is moved: its hash and its stream in Redis, and their compressed forms."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from workers.archive.filters import JobFacts, digest_pair, digest_words

LogEntry = tuple[str, dict[str, str]]
"""An entry of a job's stream: its id and its fields."""


@dataclass(frozen=True)
class JobRecord:
    """A job that has ended, as it was read from Redis."""

    fields: dict[str, str]
    entries: list[LogEntry]

    @property
    def id(self) -> str:
        return self.fields["id"]

    @cached_property
    def facts(self) -> JobFacts:
        """The properties by which lists choose it."""
        return JobFacts(self.fields)

    @property
    def num_chars(self) -> int:
        """The number of characters of the stream's values."""
        return sum(len(value) for _, fields in self.entries for value in fields.values())

    def prepare(self) -> Self:
        """Compute the forms below and return the record: it takes a millisecond, which belongs into a thread."""
        _ = self.row, self.entries_data, self.pairs, self.words
        return self

    @cached_property
    def row(self) -> dict[str, Any]:
        """The row of the table of jobs."""
        facts = self.facts
        return {
            "n": int(self.fields["n"]),
            "id": self.id,
            "owner": self.fields["owner"],
            "status": facts.status,
            "dead": facts.is_dead,
            "strategy": facts.strategy,
            "model": facts.model,
            "name": facts.name,
            "batch": self.fields.get("batch"),
            "created": facts.created,
            "finished_ms": round(float(self.fields["finished"]) * 1000),
            "seq": int(self.fields["seq"]),
            "fields": compress(self.fields),
        }

    @cached_property
    def pairs(self) -> set[int]:
        """The digests of its metadata."""
        return {digest_pair(key, value) for key, value in self.facts.metadata.items()}

    @cached_property
    def words(self) -> list[int]:
        """The digests of its owner and of the words of its problem, in order."""
        return sorted(digest_words(self.fields["owner"], self.facts.words))

    @cached_property
    def entries_data(self) -> bytes:
        """The stream in the form of the table of journals."""
        return compress(self.entries)


def render_digests(digests: Iterable[int]) -> str:
    """Return digests as words of a text."""
    return " ".join(f"{digest & 0xFFFF_FFFF_FFFF_FFFF:016x}" for digest in digests)


def compress(value: Any) -> bytes:
    """Return compressed JSON, whose escapes keep characters that no encoding has."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode("ascii"), 1)


def decompress(data: bytes) -> Any:
    """Return what ``compress`` was given."""
    return json.loads(zlib.decompress(data))
