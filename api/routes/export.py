"""Route of ``GET /v1/jobs/export``: jobs that have ended, as they are or as training data."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from api.http.principal import Reader
from api.http.problems import Problem, ProblemDocument
from api.http.request_parsing import check_query_parameters
from api.http.state import State
from reasoner.training_data.formats import FORMATS
from reasoner.training_data.parquet import MissingParquet, ParquetRows
from reasoner.training_data.recorded_job import LeftOut, RecordedJob
from reasoner.training_data.selection import JOBS, ExportQuery
from workers.archive.errors import ArchiveDown
from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore, NoSuchJob

log = structlog.get_logger("reasoner.api")

JSON_LINES = "application/x-ndjson"
PARQUET = "application/vnd.apache.parquet"

PATIENCE_SECONDS = 30.0
"""Time for which an export waits for an absent broker."""
PAUSE_SECONDS = 0.5

router = APIRouter(
    prefix="/v1/jobs",
    tags=["jobs"],
    responses={"default": {"model": ProblemDocument}},
    dependencies=[Depends(check_query_parameters)],
)


@router.get(
    "/export",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {
                JSON_LINES: {"schema": {"type": "string"}},
                PARQUET: {"schema": {"type": "string", "format": "binary"}},
            }
        }
    },
    summary="Export jobs that have ended",
)
async def export(state: State, principal: Reader, query: Annotated[ExportQuery, Query()]) -> StreamingResponse:
    """Jobs in the order in which they ended, up to the time of the request: one a line (JSON Lines), or as rows for
    training. Export regularly to keep jobs for longer than the service does.
    """
    contradiction = query.find_contradiction()
    if contradiction is not None:
        raise Problem(422, "invalid-request", ": ".join(contradiction), errors=[contradiction])
    # Before the response begins, since these raise while the broker or the archive is away.
    now = await state.store.get_broker_time() - 0.001  # in which a job may yet end
    if state.store.archive is not None:
        await state.store.archive.check()
    until = now if query.until is None else min(now, query.until - 0.001)
    jobs = _iterate_jobs(state.store, principal.visible_owner, query, until)
    if query.format == JOBS:
        return _respond(_write_jobs(jobs, query), "jobs.jsonl", JSON_LINES)
    if query.file == "jsonl":
        return _respond(_write_lines(jobs, query), f"{query.format}.jsonl", JSON_LINES)
    try:
        file = await asyncio.to_thread(ParquetRows, query.format)
    except MissingParquet as error:
        raise Problem(501, "parquet-not-installed", str(error), errors=[("file", str(error))]) from None
    return _respond(_write_parquet(jobs, query, file), f"{query.format}.parquet", PARQUET)


def _respond(content: AsyncIterator[str] | AsyncIterator[bytes], name: str, media_type: str) -> StreamingResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(content, media_type=media_type, headers=headers)


async def _iterate_jobs(
    store: JobStore, owner: str | None, query: ExportQuery, until: float
) -> AsyncIterator[tuple[dict[str, Any], RecordedJob | None]]:
    """Yield the wanted jobs, one after the other, with what their journals recorded if the query needs it.

    A long export outlasts a short absence of the broker.
    """
    since, after, last_success = query.since, query.after, time.monotonic()
    while True:
        try:
            async for job_id in store.iterate_ended(owner, since, until, after):
                document, job = await _read_job(store, query, job_id)
                if document is None:
                    continue
                yield document, job
                since, after, last_success = document["finished_at"], job_id, time.monotonic()
            return
        except (ArchiveDown, *BROKER_DOWN):
            if time.monotonic() - last_success > PATIENCE_SECONDS:
                raise
            await asyncio.sleep(PAUSE_SECONDS)


async def _read_job(
    store: JobStore, query: ExportQuery, job_id: str
) -> tuple[dict[str, Any], RecordedJob | None] | tuple[None, None]:
    """Return a job and what its journal recorded; nothing for one that is not wanted."""
    try:
        document = await store.get(job_id)
    except NoSuchJob:  # deleted in the meantime
        return None, None
    if not query.wants(document):
        return None, None
    if not query.needs_events:
        return document, None
    events = await store.load_events(job_id)
    if query.journal:
        document["events"] = [event.model_dump() for event in events]
    job = RecordedJob.from_events(document, events)
    return (document, job) if query.has_score(job.view) else (None, None)


async def _write_jobs(
    jobs: AsyncIterator[tuple[dict[str, Any], RecordedJob | None]], _query: ExportQuery
) -> AsyncIterator[str]:
    async for document, _ in jobs:
        yield json.dumps(document, separators=(",", ":")) + "\n"


class _Counts:
    """Numbers of jobs and rows so far."""

    def __init__(self) -> None:
        self._jobs = 0
        self._rows = 0
        self._left_out: Counter[str] = Counter()

    def build_rows(self, job: RecordedJob | None, query: ExportQuery) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a job, and count them; none for a job that is left out."""
        assert job is not None  # formats with rows need events
        try:
            rows = FORMATS[query.format].build(job, query.by, query.margin)
        except LeftOut as reason:
            self._left_out[str(reason)] += 1
            return []
        except (ValidationError, LookupError):  # as of a job that another version has stored
            log.exception("job left out of an export: it cannot be read")
            self._left_out["unreadable"] += 1
            return []
        self._jobs += 1
        self._rows += len(rows)
        return rows

    def describe(self) -> dict[str, Any]:
        return {"jobs": self._jobs, "rows": self._rows, "left_out": dict(self._left_out)}


async def _write_lines(
    jobs: AsyncIterator[tuple[dict[str, Any], RecordedJob | None]], query: ExportQuery
) -> AsyncIterator[str]:
    counts = _Counts()
    async for _, job in jobs:
        for row in counts.build_rows(job, query):
            yield json.dumps(row, separators=(",", ":")) + "\n"
    if query.summary:
        yield json.dumps({"summary": counts.describe()}, separators=(",", ":")) + "\n"


async def _write_parquet(
    jobs: AsyncIterator[tuple[dict[str, Any], RecordedJob | None]],
    query: ExportQuery,
    file: ParquetRows,
) -> AsyncIterator[bytes]:
    counts = _Counts()
    async for _, job in jobs:
        file.add(counts.build_rows(job, query))
        if file.is_full:
            yield await asyncio.to_thread(file.flush)
    yield await asyncio.to_thread(file.close, counts.describe())
