"""Export of the spans of ended jobs (``search_spans``) to the collector.

It runs in each API process, of which one exports at a time. How far it has come is in Redis, so that the spans of a job
are exported whichever processes die, and however long the collector is away. What a process exported without recording
it is exported again, with the same ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Sequence

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from reasoner.jobs.job import TERMINAL_STATUSES
from workers.archive.errors import ArchiveDown
from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore, NoSuchJob
from workers.telemetry.search_spans import JOB, SpanRecord, derive_span_id, derive_trace_id, describe_search
from workers.telemetry.tracing import FLUSH_SECONDS

INTERVAL_SECONDS = 1.0
MAX_INTERVAL_SECONDS = 60.0
"""The interval while the collector takes nothing; it doubles up to here."""
TERM_SECONDS = 60.0
"""The right to export ends so long after a process last extended it: longer than the exporter tries one request."""
MAX_SPANS = 512
"""Spans of one request."""
MAX_REFUSED_SECONDS = 3600.0
"""Spans that the collector has not taken for so long are dropped, so that what it refuses does not stop all others."""

log = structlog.get_logger("reasoner.telemetry")


class NotExportedError(Exception):
    """The collector is away, or refuses the spans."""


class SpanExport:
    """Exports in an interval until ``stop``."""

    def __init__(self, store: JobStore, exporter: SpanExporter, resource: Resource, *, with_content: bool) -> None:
        self._store = store
        self._exporter = exporter
        self._resource = resource
        self._scope = InstrumentationScope("reasoner")
        self._with_content = with_content
        self._holder = uuid.uuid4().hex
        self._stopping = asyncio.Event()
        self._failing_since: float | None = None

    async def run(self) -> None:
        interval = INTERVAL_SECONDS
        await self._export_and_report()  # at once: the first export of a service begins with what ends from then on
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._stopping.wait()
            is_done = await self._export_and_report()
            interval = INTERVAL_SECONDS if is_done else min(2 * interval, MAX_INTERVAL_SECONDS)

    async def stop(self, running: asyncio.Task[None]) -> None:
        """End ``run`` after what has ended so far is exported, or after ``FLUSH_SECONDS``; another process goes on."""
        self._stopping.set()
        await asyncio.wait({running}, timeout=FLUSH_SECONDS)
        await asyncio.to_thread(self._exporter.shutdown)  # ends a request, too
        running.cancel()
        await asyncio.wait({running})
        with contextlib.suppress(*BROKER_DOWN):
            await self._store.claim_span_export(self._holder, 0.0)

    async def _export_and_report(self) -> bool:
        """Export once. Return False, and log the reason when it is new, if that was not possible."""
        try:
            await self.export_ended()
        except (ArchiveDown, *BROKER_DOWN):
            return False  # logged by the reaper
        except NotExportedError:
            if self._failing_since is None:
                log.warning("the collector does not take spans: they are exported later")
                self._failing_since = time.monotonic()
            return False
        except Exception:
            log.exception("spans could not be exported")
            return False
        self._failing_since = None
        return True

    async def export_ended(self) -> int:
        """Export the spans of all jobs that have ended since the last export. Return their number.

        Raises ``NotExportedError``. Nothing happens while another process exports.
        """
        exported = await self._store.claim_span_export(self._holder, TERM_SECONDS)
        if exported is None:
            return 0
        # Without the present millisecond, in which more jobs may end.
        until = math.ceil(await self._store.get_broker_time() * 1000) - 1
        waiting: list[ReadableSpan] = []
        count = 0
        async for job_id in self._store.iterate_ended(None, (exported + 1) / 1000, (until + 0.5) / 1000):
            try:
                ended, spans = await self._read_spans(job_id)
            except (ArchiveDown, *BROKER_DOWN):
                raise
            except Exception:  # one job cannot keep the spans of all that ended after it
                log.exception("the spans of a job could not be read: it is left out", job=job_id)
                continue
            if len(waiting) + len(spans) > MAX_SPANS and waiting:
                await self._send(waiting)
                waiting = []
                if ended is not None and not await self._record(ended - 1):
                    return count
            waiting += spans
            count += len(spans)
        await self._send(waiting)
        await self._record(until)
        return count

    async def _record(self, exported: int) -> bool:
        """Record the progress. Return False if another process has taken over."""
        return await self._store.claim_span_export(self._holder, TERM_SECONDS, exported) is not None

    async def _read_spans(self, job_id: str) -> tuple[int | None, list[ReadableSpan]]:
        """Return the time (ms) of a job's end, and its spans: none if it was deleted, goes on, or is not sampled."""
        try:
            job = await self._store.get(job_id)
        except NoSuchJob:
            return None, []
        origin = (await self._store.get_origin(job_id)).traceparent
        if job["status"] not in TERMINAL_STATUSES or (origin and not int(origin[-2:], 16) & TraceFlags.SAMPLED):
            return None, []
        events = await self._store.load_events(job_id)
        if not events:  # deleted meanwhile
            return None, []
        records = await asyncio.to_thread(describe_search, job, events, with_content=self._with_content)
        return round(job["finished_at"] * 1000), [self._make_span(job_id, origin, record) for record in records]

    def _make_span(self, job_id: str, origin: str, record: SpanRecord) -> ReadableSpan:
        """Return a span. ``origin``: the ``traceparent`` of the job's request, empty if that was not traced."""
        _, trace, request, _ = origin.split("-") if origin else ("", "", "", "")
        trace_id = int(trace, 16) if trace else derive_trace_id(job_id)
        parent = int(request, 16) if request else None
        if record.parent is not None:
            parent = derive_span_id(job_id, record.parent)
        return ReadableSpan(
            record.title,
            _make_context(trace_id, derive_span_id(job_id, record.name)),
            parent=None if parent is None else _make_context(trace_id, parent, is_remote=record.name == JOB),
            resource=self._resource,
            attributes=record.attributes,
            events=[SpanEvent(name, attributes, _to_nanoseconds(at)) for name, at, attributes in record.marks],
            kind=SpanKind.CLIENT if record.kind == "client" else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if record.is_error else StatusCode.UNSET),
            start_time=_to_nanoseconds(record.start),
            end_time=_to_nanoseconds(record.end),
            instrumentation_scope=self._scope,
        )

    async def _send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans in requests of ``MAX_SPANS``. Raises ``NotExportedError``, but not for ever."""
        for start in range(0, len(spans), MAX_SPANS):
            batch = spans[start : start + MAX_SPANS]
            if await asyncio.to_thread(self._exporter.export, batch) is SpanExportResult.SUCCESS:
                continue
            if self._failing_since is None or time.monotonic() - self._failing_since < MAX_REFUSED_SECONDS:
                raise NotExportedError
            log.error("the collector did not take spans for too long: they are dropped", spans=len(batch))
            self._failing_since = time.monotonic()


def _make_context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _to_nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
