"""Batches of files in Redis: what is known of their lines, and who goes on with them.

One process at a time holds a batch, by a claim that ends soon if the process does not renew it. It submits the lines as
jobs, a few at a time, and writes their results in order. Both positions in the file change with what they count, so
that a process which takes over goes on exactly there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, Self

from reasoner.budget.allocator import MAX_ACTIVE_JOBS, initial_grant
from workers.config.rate_limits import Quota, QuotaExceeded
from workers.store.batches import BatchDocument, BatchStore
from workers.store.files import NoSuchFile
from workers.store.jobs import JobStore, check_submitted, idempotency_record, new_id
from workers.store.request_origin import ORIGIN
from workers.store.serialization import to_json

MAX_OPEN_BATCHES = 1000
"""The limit of each owner."""
_RETRY_AFTER_SECONDS = 60
Stage = Literal["validating", "in_progress", "finalizing"]
Closing = Literal["cancelled", "expired", "revoked"]
"""The reason why a batch ends early; ``revoked``: its key is no longer valid."""
End = Literal["failed", "completed", "cancelled", "expired"]


class ClaimLost(Exception):
    """Another process has taken the batch over."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file: the index of the next request, the number of lines before it, and their bytes."""

    index: int = 0
    line: int = 0
    offset: int = 0

    def __str__(self) -> str:
        """Return the stored form."""
        return f"{self.index}:{self.line}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``."""
        return cls(*map(int, text.split(":")))


@dataclass(frozen=True, slots=True)
class NewFileBatch:
    """A batch of a file as its owner describes it. ``output_seconds``: for how long its results are kept."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window_seconds: float
    metadata: dict[str, str]
    budget: dict[str, int] | None
    line_defaults: dict[str, Any]
    output_seconds: float


@dataclass(frozen=True, slots=True)
class FileBatch:
    """A claimed batch. ``is_expired``: its completion window is over."""

    id: str
    token: int
    owner: str
    key_id: str
    models: frozenset[str] | None
    """The models that its owner's key may use; ``None`` for all."""
    stage: Stage
    closing: Closing | None
    is_expired: bool
    input_file_id: str
    endpoint: str
    shares_budget: bool
    budget_tokens: int
    line_defaults: dict[str, Any]
    total: int
    fed: Position
    written: Position

    @classmethod
    def from_fields(cls, token: int, now_ms: float, fields: dict[str, str]) -> Self:
        """Return the batch of a stored hash."""
        budget, closing = json.loads(fields["budget"]), fields.get("closing")
        return cls(
            id=fields["id"],
            token=token,
            owner=fields["owner"],
            key_id=fields["key"],
            models=None if (models := json.loads(fields["models"])) is None else frozenset(models),
            stage=fields["stage"],  # type: ignore[arg-type]  # as the scripts write it
            closing=closing,  # type: ignore[arg-type]
            is_expired=float(fields["expires"]) * 1000 <= now_ms,
            input_file_id=fields["input"],
            endpoint=fields["endpoint"],
            shares_budget=budget is not None,
            budget_tokens=0 if budget is None else budget["tokens"],
            line_defaults=json.loads(fields["defaults"]),
            total=int(fields["total"]),
            fed=Position.parse(fields["fed"]),
            written=Position.parse(fields["written"]),
        )

    def derive_id(self, kind: str, part: int | str) -> str:
        """Return the id of a line's job, or of a file of results: the same for every process."""
        return f"{kind}{blake2b(f'{self.id}:{part}'.encode(), digest_size=16).hexdigest()}"

    def job_id(self, index: int) -> str:
        """Return the id of a line's job."""
        return self.derive_id("job_", index)


@dataclass(frozen=True, slots=True)
class LineJob:
    """A line that is submitted: its job, unless it cannot become one, and the position behind it.

    ``refusal``: the reason (JSON); empty if that is recorded already. ``form``: as in ``JobStore.submit``.
    """

    behind: Position
    job_id: str = ""
    spec: dict[str, Any] | None = None
    form: str = ""
    refusal: str = ""

    def list_arguments(self) -> tuple[str, str, str, str, str]:
        """Return the arguments of the script."""
        if self.spec is None:
            return "", "", "", self.refusal, str(self.behind)
        return self.job_id, to_json(self.spec), self.spec["priority"], self.form, str(self.behind)


class FileBatchStore:
    """The batches of files in the database of a ``JobStore``."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    async def submit(
        self,
        batch: NewFileBatch,
        *,
        owner: str,
        key_id: str,
        models: Collection[str] | None = None,
        idempotency: tuple[str, str] | None = None,
        quota: Quota | None = None,
    ) -> tuple[BatchDocument, bool]:
        """Store a batch. Return it, and True if it is new. Raises as ``JobStore.submit``, and ``NoSuchFile``."""
        key, digest = idempotency_record("batch", owner, idempotency)
        quota = quota or Quota()
        outcome, *details = await self._store.script(
            "file_batch_submit",
            new_id("batch"),
            owner,
            ORIGIN.get().to_json(),
            key_id,
            to_json(None if models is None else sorted(models)),
            batch.input_file_id,
            batch.endpoint,
            batch.completion_window,
            round(batch.window_seconds * 1000),
            to_json(batch.metadata),
            to_json(batch.budget),
            to_json(batch.line_defaults),
            round(batch.output_seconds * 1000),
            MAX_OPEN_BATCHES,
            key,
            digest,
            quota.to_json(),
        )
        if outcome == "gone":
            raise NoSuchFile(batch.input_file_id)
        if outcome == "full":
            message = f"{MAX_OPEN_BATCHES} of your batches are unfinished, and that is the limit"
            raise QuotaExceeded(message, _RETRY_AFTER_SECONDS)
        document = await BatchStore(self._store).get(check_submitted(outcome, details, quota))
        return document, bool(outcome == "created")

    async def claim(self, lease: float) -> FileBatch | None:
        """Take over a batch that no process holds, for ``lease`` seconds; ``None`` if there is none."""
        claimed = await self._store.script("file_batch_claim", round(lease * 1000))
        if not claimed:
            return None
        token, now_ms, row = claimed
        return FileBatch.from_fields(token, float(now_ms), dict(zip(row[::2], row[1::2], strict=True)))

    async def hold(self, batch: FileBatch, seconds: float) -> None:
        """Keep the batch for some time more, or less. Raises ``ClaimLost``, as all methods below."""
        await self._run("file_batch_hold", batch, round(seconds * 1000))

    async def refuse(self, batch: FileBatch, refusals: dict[int, str]) -> None:
        """Record lines that cannot become jobs: the reason (JSON) by the line's index."""
        if refusals:
            await self._run("file_batch_refuse", batch, *(part for pair in refusals.items() for part in pair))

    async def load_refusals(self, batch: FileBatch, start: int, count: int) -> list[str | None]:
        """Return the recorded reasons of ``count`` lines from the index ``start``."""
        key = f"reasoner:batch:{batch.id}:refused"
        found: list[str | None] = await self._store.command("HMGET", key, *range(start, start + count))
        return found

    async def begin(self, batch: FileBatch, total: int, num_valid: int) -> None:
        """Begin a batch whose lines are checked. A shared budget has at least one token for each valid line."""
        parts: tuple[int | str, ...] = ("", "", "", "")
        if batch.shares_budget:
            share = batch.budget_tokens // num_valid
            floor = initial_grant(batch.budget_tokens, num_valid)
            parts = (share, floor, batch.budget_tokens - share * num_valid, MAX_ACTIVE_JOBS)
        await self._run("file_batch_begin", batch, total, *parts)

    async def find_room(self, batch: FileBatch, *, queue_cap: int, quota: Quota) -> tuple[int, float]:
        """Return for how many further jobs of the batch's owner there is room now, and for how many of their tokens."""
        jobs, tokens = await self._store.script("file_batch_room", batch.owner, queue_cap, quota.to_json())
        return int(jobs), float(tokens or "inf")

    async def feed(
        self, batch: FileBatch, lines: Sequence[LineJob], *, queue_cap: int, quota: Quota
    ) -> tuple[FileBatch, bool]:
        """Submit the lines behind ``batch.fed`` as far as there is room. Return the batch, and True if all had room."""
        arguments = [part for line in lines for part in line.list_arguments()]
        outcome, taken = await self._store.script(
            "file_batch_feed", batch.id, batch.token, str(batch.fed), queue_cap, quota.to_json(), *arguments
        )
        if outcome == "lost":
            raise ClaimLost(batch.id)
        fed = lines[int(taken) - 1].behind if int(taken) else batch.fed
        return replace(batch, fed=fed), bool(outcome == "ok")

    async def find_open(self, batch: FileBatch) -> dict[str, int]:
        """Return the unfinished jobs with the indexes of their lines, in order."""
        rows = await self._store.command("ZRANGE", f"reasoner:batch:{batch.id}:open", 0, -1, "WITHSCORES")
        pairs = rows if rows and isinstance(rows[0], list | tuple) else zip(rows[::2], rows[1::2], strict=True)
        return {job_id: int(float(index)) for job_id, index in pairs}

    async def record_written(
        self, batch: FileBatch, behind: Position, *, succeeded: int, errored: int, unfinished: int
    ) -> FileBatch:
        """Record that the results of the lines from ``batch.written`` to another position are written.

        ``unfinished``: those of the ``errored`` ones that had not ended when the batch was closed.
        """
        counts = (succeeded, errored, unfinished)
        await self._run("file_batch_written", batch, str(batch.written), str(behind), *counts)
        return replace(batch, written=behind)

    async def count_unfinished(self, batch_id: str) -> int:
        """Return the number of lines that had not ended when the batch was cancelled or its window was over."""
        return int(await self._store.command("HGET", f"reasoner:batch:{batch_id}", "unfinished") or 0)

    async def close(self, batch: FileBatch, reason: Closing) -> FileBatch:
        """Submit no further line."""
        await self._store.script("file_batch_close", batch.id, reason)
        return replace(batch, closing=batch.closing or reason)

    async def finalize(self, batch: FileBatch) -> None:
        """Record that all results are written."""
        await self._run("file_batch_finalize", batch)

    async def end(
        self,
        batch: FileBatch,
        stage: End,
        *,
        outputs: Sequence[tuple[str, str, int]] = (),
        errors: dict[str, Any] | None = None,
    ) -> None:
        """End the batch, with files of results: each its field ``output`` or ``error``, its id, and its length."""
        parts = (part for output in outputs for part in output)
        await self._run("file_batch_end", batch, stage, to_json(errors), *parts)

    async def _run(self, script: str, batch: FileBatch, *arguments: str | int) -> None:
        if await self._store.script(script, batch.id, batch.token, *arguments) == "lost":
            raise ClaimLost(batch.id)
