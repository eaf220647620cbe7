"""The check of a batch's file before any of its lines runs: which lines are requests, and whether there are any."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog

from api.batches.lines import CHUNK_LINES, InvalidLine, RawLine, parse_line, read_chunk
from api.batches.results import describe_invalid
from api.http.state import ServiceState
from reasoner.jobs.batch import MAX_BATCH_LINES, BatchError, BatchErrors
from workers.store.file_batches import FileBatch, FileBatchStore, Position

MAX_LISTED_ERRORS = 100

log = structlog.get_logger("reasoner.batches")


async def check_file(batch: FileBatch, state: ServiceState) -> None:
    """Record the lines that are no requests, and begin the batch, or end it as ``failed`` if nothing of it can run.

    A line that is no request is an error among the results, and the others run.
    """
    batches, path, check = FileBatchStore(state.store), state.files.get_path(batch.input_file_id), _LineCheck(batch)
    position, max_bytes = Position(), state.settings.body_cap
    try:
        while lines := await asyncio.to_thread(read_chunk, path, position, CHUNK_LINES, max_bytes):
            position = lines[-1].behind
            if position.index > MAX_BATCH_LINES:
                break
            await batches.refuse(batch, await asyncio.to_thread(check.add, lines))
    except FileNotFoundError:
        await fail_without_file(batch, batches)
        return
    errors = _find_errors(position.index, check)
    if errors:
        await _fail(batches, batch, errors)
        return
    await batches.begin(batch, position.index, check.num_valid)


class _LineCheck:
    """The lines of a file so far: their ids, the number of requests, and the first errors."""

    def __init__(self, batch: FileBatch) -> None:
        self.num_valid = 0
        self.errors: list[BatchError] = []
        self.batch = batch
        self._line_of: dict[str, int] = {}

    def add(self, lines: Sequence[RawLine]) -> dict[int, str]:
        """Check the next lines. Return the reasons (JSON) of those that are no requests, by their indexes."""
        refusals: dict[int, str] = {}
        for raw in lines:
            try:
                self._check(raw)
                self.num_valid += 1
            except InvalidLine as error:
                refusals[raw.index] = describe_invalid(raw, error)
                if len(self.errors) < MAX_LISTED_ERRORS:
                    fields: dict[str, Any] = {"param": error.param, "line": raw.number}
                    self.errors.append(BatchError(code=error.code, message=str(error), **fields))
        return refusals

    def _check(self, raw: RawLine) -> None:
        custom_id = parse_line(raw, self.batch.endpoint).custom_id or ""
        first = self._line_of.setdefault(custom_id, raw.number)
        if first != raw.number:
            message = f"custom_id: line {first} has it, too: give each line one of its own"
            raise InvalidLine("duplicate_custom_id", message, "custom_id", custom_id)


def _find_errors(num_lines: int, check: _LineCheck) -> list[BatchError]:
    """Return why nothing of a file can run; no error if a line can."""
    if num_lines == 0:
        message = "the file has no lines: write one request a line, as JSON"
        return [BatchError(code="empty_file", message=message, param="input_file_id")]
    if num_lines > MAX_BATCH_LINES:
        message = f"the file has more than {MAX_BATCH_LINES} lines: split it"
        return [BatchError(code="too_many_lines", message=message, param="input_file_id")]
    if check.num_valid == 0:
        return check.errors
    if check.batch.shares_budget and check.batch.budget_tokens < check.num_valid:
        tokens = check.batch.budget_tokens
        message = f"{tokens} tokens are too few for {check.num_valid} lines: give at least one token per line"
        return [BatchError(code="budget_too_small", message=message, param="budget.tokens")]
    return []


async def fail_without_file(batch: FileBatch, batches: FileBatchStore) -> None:
    """End a batch whose file this process cannot read."""
    message = "the bytes of the file are not in files_dir of this process, which all API processes must share"
    await _fail(batches, batch, [BatchError(code="file_missing", message=message, param="input_file_id")])


async def _fail(batches: FileBatchStore, batch: FileBatch, errors: list[BatchError]) -> None:
    log.info("batch failed", batch=batch.id, code=errors[0].code)
    await batches.end(batch, "failed", errors=BatchErrors(data=errors).model_dump())
