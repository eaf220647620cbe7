"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, TypeVar

import httpx

from reasoner.client import _calls
from reasoner.client._errors import ServiceError, refusal, unreachable, unserializable
from reasoner.client._event_cursor import STREAM_TIMEOUT, EventCursor
from reasoner.jobs.batch import Batch
from reasoner.jobs.events import Event
from reasoner.jobs.job import Job

T = TypeVar("T")


class AsyncClient:
    """Client of a running service for asyncio. Use it as an async context manager, or call ``close``.

    Requests that do no harm when they arrive twice are repeated while the service is briefly unavailable. Every method
    raises ``ServiceError`` when the service refuses or cannot be reached.
    """

    def __init__(self, url: str, key: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """``url`` is the address of the service, such as ``http://127.0.0.1:8000``; ``key`` an API key if it has any.

        ``transport`` replaces the network, for tests and Unix sockets. Raises ``ServiceError`` for a malformed address
        or key.
        """
        self.url = url
        self._http = httpx.AsyncClient(**_calls.connection_options(url, key, transport))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def submit(self, spec: dict[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Submit a job: the fields of ``JobSpec``, at least ``problem`` or ``messages``.

        With an ``idempotency_key`` the same job, submitted again, is the one that exists already.
        """
        return await self._send(_calls.submit(spec, idempotency_key))

    async def select(self, question: str, candidates: Sequence[Any], **fields: Any) -> Job:
        """Submit a ranking of your own candidates, texts or conversations: a job whose result has a ``ranking``.

        ``fields`` are those of ``POST /v1/select``, such as ``by`` and ``verifier``.
        """
        return await self._send(_calls.select(question, candidates, fields))

    async def get(self, job_id: str) -> Job:
        """Return a job as it is now."""
        return await self._send(_calls.get(job_id))

    async def list(self, *, limit: int = 20, after: str | None = None, status: str | None = None) -> dict[str, Any]:
        """Return a page of jobs, newest first; ``after`` is the ``last_id`` of the page before."""
        return await self._send(_calls.list_jobs(limit, after, status))

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended."""
        await self._send(_calls.delete(job_id))

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job."""
        return await self._send(_calls.cancel(job_id))

    async def retry(self, job_id: str) -> Job:
        """Run a failed job again from its journal."""
        return await self._send(_calls.retry(job_id))

    async def tree(self, job_id: str) -> dict[str, Any]:
        """Return the search tree of a job so far."""
        return await self._send(_calls.tree(job_id))

    async def events(self, job_id: str, after: int = 0) -> AsyncIterator[Event]:
        """Yield the job's events from number ``after + 1`` to its end, over new connections where one is lost."""
        cursor = EventCursor(self.url, job_id, after)
        while True:
            try:
                async with self._stream(cursor.call(), timeout=STREAM_TIMEOUT) as response:
                    async for line in response.aiter_lines():
                        if (event := cursor.read(line)) is not None:
                            yield event
            except (httpx.TransportError, ServiceError) as error:
                await asyncio.sleep(cursor.pause_after(error))
            else:
                if cursor.is_complete(response.status_code):
                    return

    async def wait(self, job_id: str) -> Job:
        """Return the job when it has ended."""
        async for _ in self.events(job_id):
            pass
        return await self.get(job_id)

    async def export(
        self, *, since: float = 0.0, status: str | None = None, journal: bool = False
    ) -> AsyncIterator[str]:
        """Yield the jobs that ended at ``since`` (seconds since 1970) or later, one line of JSON each."""
        try:
            async with self._stream(_calls.export(since, status, journal)) as response:
                async for line in response.aiter_lines():
                    yield line
        except httpx.TransportError as error:
            raise ServiceError(f"the export from {self.url} broke off: {error}") from None

    async def default_strategy(self) -> str:
        """Return the strategy of jobs that name none."""
        return str((await self._send(_calls.strategies()))["default"])

    async def models(self) -> dict[str, Any]:
        """Return the served models, with the defaults of their jobs."""
        return await self._send(_calls.models())

    async def submit_batch(self, spec: dict[str, Any]) -> Batch:
        """Submit jobs that share a budget: the fields of ``BatchSpec``."""
        return await self._send(_calls.submit_batch(spec))

    async def batch(self, batch_id: str) -> Batch:
        """Return a batch and its jobs as they are now."""
        return await self._send(_calls.batch(batch_id))

    async def list_batches(self, *, limit: int = 20, after: str | None = None) -> dict[str, Any]:
        """Return a page of batches, newest first."""
        return await self._send(_calls.list_batches(limit, after))

    async def cancel_batch(self, batch_id: str) -> Batch:
        """Cancel all jobs of a batch."""
        return await self._send(_calls.cancel_batch(batch_id))

    async def create_key(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Make an API key; the response alone contains it."""
        return await self._send(_calls.create_key(spec))

    async def list_keys(self, *, limit: int = 20, after: str | None = None) -> dict[str, Any]:
        """Return a page of API keys, newest first, without the secrets."""
        return await self._send(_calls.list_keys(limit, after))

    async def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Revoke an API key."""
        return await self._send(_calls.revoke_key(key_id))

    async def _send(self, call: _calls.Call[T]) -> T:
        for repeats_left in reversed(range(call.max_repeats + 1)):
            try:
                return call.read(await self._send_once(call))
            except ServiceError as error:
                if not error.is_transient or not repeats_left:
                    raise
            await asyncio.sleep(_calls.PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    async def _send_once(self, call: _calls.Call[T]) -> httpx.Response:
        try:
            response = await self._http.request(**call.arguments())
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from None
        except ValueError as error:
            raise unserializable(error) from None
        if response.is_error:
            raise refusal(response)
        return response

    @contextlib.asynccontextmanager
    async def _stream(self, call: _calls.Call[None], **options: Any) -> AsyncIterator[httpx.Response]:
        async with self._http.stream(**call.arguments(), **options) as response:
            if response.is_error:
                await response.aread()
                raise refusal(response)
            yield response
