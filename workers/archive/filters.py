"""Choosing jobs by what their requests say: the same for a job in Redis and for one in the archive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

DEAD: Final = "dead"
"""Filter of job lists besides the statuses: failed jobs that repeatedly lost their worker without progress."""
_IDEOGRAPHS: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD: Final = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")


def split_words(text: str) -> frozenset[str]:
    """Return the words of a text in small letters. Chinese and Japanese characters are a word each."""
    return frozenset(_WORD.findall(text.casefold()))


def digest_pair(key: str, value: str) -> int:
    """Return a signed number of 64 bits for a key of the metadata with its value."""
    data = f"{len(key)}:{key}{value}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)


def digest_words(owner: str | None, words: Iterable[str]) -> set[int]:
    """Return the digests by which the words of an owner's jobs are found; those of all owners with ``None``."""
    owners = set() if owner is None else {digest_pair("owner", owner)}
    return owners | {digest_pair("word", word) for word in words}


@dataclass(frozen=True)
class JobFacts:
    """The properties by which lists choose a job."""

    fields: Mapping[str, str]
    """Its hash in Redis."""

    @cached_property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = json.loads(self.fields["spec"])
        return spec

    @property
    def status(self) -> str:
        return self.fields["status"]

    @property
    def is_dead(self) -> bool:
        error = json.loads(self.fields.get("error", "null"))
        return self.status == "failed" and error is not None and error.get("code") == "max_attempts"

    @property
    def strategy(self) -> str:
        return str((self.spec.get("strategy") or {}).get("name", ""))

    @property
    def model(self) -> str:
        return str(self.spec.get("model", ""))

    @property
    def name(self) -> str | None:
        name: str | None = self.spec.get("name")
        return name

    @property
    def metadata(self) -> Mapping[str, str]:
        return dict(self.spec.get("metadata") or {})

    @property
    def created(self) -> float:
        return float(self.fields["created"])

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of the problem, or of what the user says in the messages."""
        turns = self.spec.get("messages") or []
        texts = [self.spec.get("problem"), *(turn.get("content") for turn in turns if turn["role"] == "user")]
        return split_words(" ".join(text for text in texts if text))


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The jobs that a list has; what is ``None`` or empty chooses nothing."""

    status: str | None = None
    """A status, or ``DEAD``."""
    strategy: str | None = None
    model: str | None = None
    name: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_after: float | None = None
    """Seconds since the epoch, this moment included."""
    created_before: float | None = None
    """Seconds since the epoch, without this moment."""
    words: frozenset[str] = frozenset()

    @property
    def is_indexed(self) -> bool:
        """True if the lists in Redis, which are by status, have these jobs alone."""
        others = (self.strategy, self.model, self.name, self.created_after, self.created_before)
        return not (self.metadata or self.words) and all(value is None for value in others)

    def matches(self, job: JobFacts) -> bool:
        """Return True for a job that is chosen."""
        is_wanted = self.status is None or (job.is_dead if self.status == DEAD else job.status == self.status)
        return (
            is_wanted
            and self.strategy in (None, job.strategy)
            and self.model in (None, job.model)
            and self.name in (None, job.name)
            and self.metadata.items() <= job.metadata.items()
            and (self.created_after is None or job.created >= self.created_after)
            and (self.created_before is None or job.created < self.created_before)
            and self.words <= job.words
        )
