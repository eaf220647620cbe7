"""The feeder: takes the batches of files through their stages, in every API process.

A process holds one batch at a time, for a few hundred lines, and lets the others have it then. If it is killed, another
one, or its successor, goes on after ``LEASE_SECONDS``.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog
from fastapi.exceptions import RequestValidationError

from api.batches.endpoints import ENDPOINTS
from api.batches.lines import CHUNK_LINES, InvalidLine, RawLine, parse_line, read_chunk
from api.batches.results import ResultWriter, build_request_id, describe_invalid, describe_refused
from api.batches.validation import check_file, fail_without_file
from api.conversation.sent_fields import naming_sent_fields
from api.http.principal import Principal
from api.http.problems import INTERNAL, Problem, refusal_problem, validation_problem
from api.http.state import ServiceState
from api.http.submission import accept_job
from reasoner.admission.refusal import JobRefused
from workers.archive.errors import ArchiveDown
from workers.config.rate_limits import Quota
from workers.store.broker_errors import BROKER_DOWN
from workers.store.file_batches import ClaimLost, End, FileBatch, FileBatchStore, LineJob
from workers.store.jobs import NoSuchJob
from workers.store.keys import KeyStore, NoSuchKey

LEASE_SECONDS = 4.0
POLL_SECONDS = 0.25
OUTAGE_SECONDS = 1.0
MAX_JOBS_IN_FLIGHT = 256
"""Unfinished jobs of one batch: enough for several workers, and for a shared budget to compare."""

log = structlog.get_logger("reasoner.batches")


class BatchFeeder:
    """Goes on with unfinished batches until ``stop``."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._batches = FileBatchStore(state.store)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End ``run``. A batch that is held goes on in another process."""
        self._stopping.set()

    async def run(self) -> None:
        """Go on with one batch after the other, again and again."""
        while not self._stopping.is_set():
            pause = POLL_SECONDS
            try:
                batch = await self._batches.claim(LEASE_SECONDS)
                if batch is not None:
                    await self._hold_and_advance(batch)
                    pause = 0.0
            except (ArchiveDown, *BROKER_DOWN):
                pause = OUTAGE_SECONDS  # the reaper logs it
            except ClaimLost as lost:
                log.info("another process goes on with a batch", batch=str(lost))
            except Exception:
                log.exception("a batch could not go on")
                pause = OUTAGE_SECONDS
            if pause:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._stopping.wait()

    async def _hold_and_advance(self, batch: FileBatch) -> None:
        """Do what can be done for a batch now, while the claim is renewed, and let go of it."""
        advancing = asyncio.create_task(self._advance(batch))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not advancing.done():
                await asyncio.wait({advancing, stopping}, timeout=LEASE_SECONDS / 4, return_when="FIRST_COMPLETED")
                if self._stopping.is_set() and not advancing.done():
                    break
                if not advancing.done():
                    await self._batches.hold(batch, LEASE_SECONDS)
        finally:
            advancing.cancel()
            stopping.cancel()
            await asyncio.wait({advancing, stopping})
        pause = advancing.result() if not advancing.cancelled() else 0.0
        await self._batches.hold(batch, pause)

    async def _advance(self, batch: FileBatch) -> float:
        """Do what can be done for a batch now. Return the seconds until there may be more.

        A batch whose file is gone, or shorter than it was, fails: nothing else could end it.
        """
        try:
            return await self._move(batch)
        except FileNotFoundError:
            await self._cancel_jobs(batch)
            await fail_without_file(batch, self._batches)
            return 0.0

    async def _move(self, batch: FileBatch) -> float:
        """Do what can be done for a batch now. Raises ``FileNotFoundError``."""
        if batch.closing is None and batch.stage != "finalizing":
            if batch.is_expired:
                batch = await self._batches.close(batch, "expired")
            elif await self._is_key_invalid(batch):
                batch = await self._batches.close(batch, "revoked")
        if batch.stage == "validating":
            await check_file(batch, self._state)
            return 0.0
        if batch.stage == "in_progress":
            has_fed, before = False, batch.written
            if batch.closing is not None:
                await self._cancel_jobs(batch)
            elif batch.fed.index < batch.total:
                batch, has_fed = await self._feed(batch)
            batch = await self._write(batch)
            if batch.written.index < batch.total:
                return 0.0 if has_fed or batch.written != before else POLL_SECONDS
            await self._batches.finalize(batch)
        writer = ResultWriter(self._state, batch)
        end: End = "cancelled" if batch.closing == "revoked" else batch.closing or "completed"
        await self._batches.end(batch, end, outputs=await writer.join())
        await writer.remove_parts()
        log.info("batch ended", batch=batch.id, status=end, reason=batch.closing)
        return 0.0

    async def _is_key_invalid(self, batch: FileBatch) -> bool:
        """Return True if the key of a batch was revoked or has expired, for which its open requests end, too."""
        try:
            return (await KeyStore(self._state.store).get(batch.key_id)).refusal() is not None
        except NoSuchKey:
            return False  # one of the settings, or a service without keys

    async def _write(self, batch: FileBatch) -> FileBatch:
        open_jobs = await self._batches.find_open(batch)
        num_ended = min(open_jobs.values(), default=batch.total if batch.closing is not None else batch.fed.index)
        return await ResultWriter(self._state, batch).write_ready(num_ended)

    async def _cancel_jobs(self, batch: FileBatch) -> None:
        for job_id in await self._batches.find_open(batch):
            with contextlib.suppress(NoSuchJob):
                await self._state.store.cancel(job_id)

    async def _feed(self, batch: FileBatch) -> tuple[FileBatch, bool]:
        """Submit some of the next lines. Return the batch, and True if there may be room for more."""
        settings = self._state.settings
        queue_cap = max(1, settings.queue_cap // 2)  # the other half is for jobs that somebody waits for
        quota = settings.limits.for_owner(batch.owner).quota
        if batch.shares_budget:
            quota = Quota(jobs=quota.jobs)  # its tokens are reserved for the batch as a whole
        free, tokens_left = await self._batches.find_room(batch, queue_cap=queue_cap, quota=quota)
        room = min(free, min(MAX_JOBS_IN_FLIGHT, queue_cap) - len(await self._batches.find_open(batch)))
        count = min(room, CHUNK_LINES, batch.total - batch.fed.index)
        if count <= 0:
            return batch, False
        path = self._state.files.get_path(batch.input_file_id)
        lines = await asyncio.to_thread(read_chunk, path, batch.fed, count, settings.body_cap)
        if not lines:
            raise FileNotFoundError(path)
        refused = await self._batches.load_refusals(batch, batch.fed.index, len(lines))
        jobs: list[LineJob] = []
        for raw, known in zip(lines, refused, strict=True):
            job = LineJob(raw.behind) if known is not None else await self._read_line(batch, raw)
            jobs.append(job)
            tokens_left -= 0 if job.spec is None else job.spec["budget"]["tokens"] or 0
            if tokens_left < 0:
                break  # there is no room for this one, nor for those behind it
        return await self._batches.feed(batch, jobs, queue_cap=queue_cap, quota=quota)

    async def _read_line(self, batch: FileBatch, raw: RawLine) -> LineJob:
        """Return the job of a line, or the reason why it cannot become one."""
        behind = raw.behind
        try:
            line = parse_line(raw, batch.endpoint)
        except InvalidLine as error:
            return LineJob(behind, refusal=describe_invalid(raw, error))
        principal = Principal(batch.key_id, batch.owner, frozenset({"jobs:read", "jobs:write"}), batch.models)
        body, request_id = batch.line_defaults | line.body, build_request_id(batch, raw.index)
        try:
            request = await ENDPOINTS[batch.endpoint].read(body, self._state, principal)
            with naming_sent_fields(request.sent_fields):
                job = request.build()
                if "priority" not in job.model_fields_set:
                    job = job.model_copy(update={"priority": "batch"})
                spec = await accept_job(job, principal, self._state, in_batch=batch.shares_budget)
        except JobRefused as refusal:
            problem = refusal_problem(refusal)
        except RequestValidationError as error:
            problem = validation_problem(error.errors(), body, None)
        except Problem as found:
            problem = found
        except (ArchiveDown, *BROKER_DOWN):
            raise
        except Exception:  # as of a request, so that one line cannot keep the others from running
            log.exception("request failed", request_id=request_id)
            problem = INTERNAL
        else:
            return LineJob(behind, batch.job_id(raw.index), spec, request.form)
        status, answer = ENDPOINTS[batch.endpoint].describe(problem, request_id)
        response = {"status_code": status, "request_id": request_id, "body": answer}
        return LineJob(behind, refusal=describe_refused(raw, line.custom_id, response))
