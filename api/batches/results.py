"""Results of a batch: a line for each line of its file, in parts while it runs, joined to two files at its end.

A part has the results of ``PART_LINES`` lines. It depends on the ended jobs alone, so a process that writes it again,
after another one was killed, writes the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from api.batches.endpoints import ENDPOINTS, has_answer
from api.batches.lines import CHUNK_LINES, InvalidLine, RawLine, parse_line, read_chunk
from api.http.problems import INTERNAL, Problem
from api.http.state import ServiceState
from workers.archive.errors import ArchiveDown
from workers.store.broker_errors import BROKER_DOWN
from workers.store.file_batches import Closing, FileBatch, FileBatchStore
from workers.store.jobs import NoSuchJob

PART_LINES = 200
MAX_PARTS = 10
"""Parts that are written before other batches have their turn."""
OUTPUT, ERROR = "output", "error"
log = structlog.get_logger("reasoner.batches")
_CLOSED: dict[Closing, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request had ended"),
    "revoked": ("key_revoked", "the batch's key was revoked, or expired, before this request had ended"),
    "expired": ("batch_expired", "this request did not end before the completion window did"),
}


def describe_invalid(raw: RawLine, error: InvalidLine) -> str:
    """Return the stored reason (JSON) of a line that is no request."""
    return _store_refusal(raw, error.custom_id, error={"code": error.code, "message": str(error), "param": error.param})


def describe_refused(raw: RawLine, custom_id: str | None, response: dict[str, Any]) -> str:
    """Return the stored reason (JSON) of a request that its endpoint refuses with a ``response``."""
    return _store_refusal(raw, custom_id, response=response, error=None)


def find_closing(result: dict[str, Any]) -> Closing | None:
    """Return why a batch was closed, for the result of a line that had not ended by then; ``None`` for others."""
    code = (result["error"] or {}).get("code")
    return next((closing for closing, (closed_code, _) in _CLOSED.items() if closed_code == code), None)


def build_request_id(batch: FileBatch, index: int) -> str:
    """Return the id of a line's request."""
    return "req_" + batch.job_id(index).removeprefix("job_")


def _store_refusal(
    raw: RawLine, custom_id: str | None, *, response: dict[str, Any] | None = None, error: dict[str, Any] | None
) -> str:
    if error is not None:
        error = error | {"message": f"line {raw.number}: {error['message']}"}
    return json.dumps({"custom_id": custom_id, "response": response, "error": error})


class ResultWriter:
    """Writes the results of one claimed batch."""

    def __init__(self, state: ServiceState, batch: FileBatch) -> None:
        self._state = state
        self._batches = FileBatchStore(state.store)
        self._batch = batch
        self._input = state.files.get_path(batch.input_file_id)
        self._folder = state.files.get_path(batch.id)

    async def write_ready(self, num_ended: int) -> FileBatch:
        """Write some parts of which all lines have ended, that is of the first ``num_ended``. Return the batch."""
        for _ in range(MAX_PARTS):
            end = min(self._batch.written.index + PART_LINES, self._batch.total)
            if end > num_ended or self._batch.written.index == end:
                break
            self._batch = await self._write_part(self._batch, end)
        return self._batch

    async def join(self) -> list[tuple[str, str, int]]:
        """Join the parts to the files of results that are not empty: each with its field, its id and its length."""
        outputs = []
        for field in (OUTPUT, ERROR):
            file_id = self._batch.derive_id("file-", field)
            num_bytes = await asyncio.to_thread(self._join_parts, field, self._state.files.get_path(file_id))
            if num_bytes:
                outputs.append((field, file_id, num_bytes))
        return outputs

    async def remove_parts(self) -> None:
        """Remove the parts, after the batch's end."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _write_part(self, batch: FileBatch, end: int) -> FileBatch:
        start, position = batch.written.index, batch.written
        counts, num_unfinished = {OUTPUT: 0, ERROR: 0}, 0
        await asyncio.to_thread(self._folder.mkdir, exist_ok=True, mode=0o700)
        with ExitStack() as open_files:
            files = {field: open_files.enter_context(_ReplacedFile(self._get_part(field, start))) for field in counts}
            while position.index < end:
                count = min(CHUNK_LINES, end - position.index)
                max_bytes = self._state.settings.body_cap
                lines = await asyncio.to_thread(read_chunk, self._input, position, count, max_bytes)
                if not lines:
                    raise FileNotFoundError(self._input)
                refusals = await self._batches.load_refusals(batch, position.index, len(lines))
                for raw, refusal in zip(lines, refusals, strict=True):
                    field, result = await self._build_result(raw, refusal)
                    counts[field] += 1
                    num_unfinished += find_closing(result) is not None
                    # ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
                    files[field].file.write(json.dumps(result).encode() + b"\n")
                position = lines[-1].behind
        succeeded, errored = counts[OUTPUT], counts[ERROR]
        return await self._batches.record_written(
            batch, position, succeeded=succeeded, errored=errored, unfinished=num_unfinished
        )

    async def _build_result(self, raw: RawLine, refusal: str | None) -> tuple[str, dict[str, Any]]:
        """Return the file of a line's result, and the result."""
        request_id = build_request_id(self._batch, raw.index)
        result: dict[str, Any] = {"id": f"batch_{request_id}", "custom_id": None, "response": None, "error": None}
        if refusal is not None:
            return ERROR, result | json.loads(refusal) | {"line": raw.number}
        try:
            line = parse_line(raw, self._batch.endpoint)
        except InvalidLine as error:  # such as one that is longer than a body may be since then
            return ERROR, result | json.loads(describe_invalid(raw, error)) | {"line": raw.number}
        result["custom_id"] = line.custom_id
        endpoint = ENDPOINTS[self._batch.endpoint]
        job_id, closing = self._batch.job_id(raw.index), self._batch.closing
        try:
            if raw.index >= self._batch.fed.index:  # the batch was closed before it became a job
                raise NoSuchJob(job_id)
            job = await self._state.store.get(job_id)
            if closing is not None and job["status"] == "cancelled":
                raise NoSuchJob(job_id)
            events = await self._state.store.load_events(job_id)
            body = self._batch.line_defaults | line.body
            answer = endpoint.answer(job, events, body, await self._state.store.get_form(job_id))
            field, status = OUTPUT if has_answer(job) else ERROR, 200
        except NoSuchJob:
            deleted = ("deleted", "the job was deleted before its result was written")
            code, message = deleted if closing is None else _CLOSED[closing]
            return ERROR, result | {"error": {"code": code, "message": message}, "line": raw.number}
        except Problem as problem:
            field, (status, answer) = ERROR, endpoint.describe(problem, request_id)
        except (ArchiveDown, *BROKER_DOWN):
            raise
        except Exception:  # as of a request, so that one line cannot keep the others from their results
            log.exception("request failed", request_id=request_id)
            field, (status, answer) = ERROR, endpoint.describe(INTERNAL, request_id)
        result["response"] = {"status_code": status, "request_id": request_id, "body": answer}
        return field, result if field == OUTPUT else result | {"line": raw.number}

    def _join_parts(self, field: str, path: Path) -> int:
        with _ReplacedFile(path) as joined:
            for part in self._list_parts(field):
                with part.open("rb") as source:
                    shutil.copyfileobj(source, joined.file, 1 << 20)
            num_bytes = joined.file.tell()
        if not num_bytes:
            path.unlink()
        return num_bytes

    def _list_parts(self, field: str) -> Iterator[Path]:
        for start in range(0, self._batch.total, PART_LINES):
            yield self._get_part(field, start)

    def _get_part(self, field: str, start: int) -> Path:
        return self._folder / f"{start}.{field}"


class _ReplacedFile:
    """A file that is there as a whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Processes of several machines, and of several containers with the same ids, may write the same file.
        self._new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
        self.file: BinaryIO = self._new.open("wb")

    def __enter__(self) -> _ReplacedFile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self.file:
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        if kind is None:
            self._new.replace(self._path)
        else:
            self._new.unlink()
