"""The blocking client. Written by `make docs` from ``_async_client.py``: change it there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from reasoner.client._errors import ServiceError, refusal, unreachable, unserializable
from reasoner.client._event_cursor import STREAM_TIMEOUT, EventCursor
from reasoner.client._requests import (
    PAUSE_SECONDS,
    connection_options,
    drop_none,
    idempotency_header,
    job_path,
    max_repeats,
    path_segment,
    read_batch,
    read_job,
    read_json,
    read_nothing,
)
from reasoner.jobs.batch import Batch
from reasoner.jobs.events import Event
from reasoner.jobs.job import Job

T = TypeVar("T")


class Client:
    """Client of a running service. Use it as a context manager, or call ``close``.

    Requests that do no harm when they arrive twice are repeated while the service is briefly unavailable. Every method
    raises ``ServiceError`` when the service refuses or cannot be reached.
    """

    def __init__(self, url: str, key: str | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
        """``url`` is the address of the service, such as ``http://127.0.0.1:8000``; ``key`` an API key if it has any.

        ``transport`` replaces the network, for tests and Unix sockets. Raises ``ServiceError`` for a malformed address
        or key.
        """
        self.url = url
        self._http = httpx.Client(**connection_options(url, key, transport))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def submit(self, spec: dict[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Submit a job: the fields of ``JobRequest``, at least ``problem`` or ``messages``.

        With an ``idempotency_key`` the same job, submitted again, is the one that exists already.
        """
        return self._send("POST", "/v1/jobs", read_job, json=spec, headers=idempotency_header(idempotency_key))

    def select(self, question: str, candidates: Sequence[Any], **fields: Any) -> Job:
        """Submit a ranking of your own candidates, texts or conversations: a job whose result has a ``ranking``.

        ``fields`` are those of ``POST /v1/select``, such as ``by`` and ``verifier``.
        """
        spec = {"problem": question, "candidates": list(candidates), **fields}
        return self._send("POST", "/v1/select", read_job, json=spec, headers=idempotency_header())

    def get(self, job_id: str) -> Job:
        """Return a job as it is now."""
        return self._send("GET", job_path(job_id), read_job)

    def list(
        self,
        *,
        limit: int = 20,
        after: str | None = None,
        metadata: Mapping[str, str] | None = None,
        **filters: str | float | None,
    ) -> dict[str, Any]:
        """Return a page of jobs, newest first; ``after`` is the ``last_id`` of the page before.

        ``filters`` are those of ``GET /v1/jobs``: ``status``, ``strategy``, ``model``, ``name``, ``owner``,
        ``created_after``, ``created_before`` and ``q``, the words of the problem.
        """
        pairs = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        params = drop_none(limit=limit, after=after, **filters) | pairs
        return self._send("GET", "/v1/jobs", read_json, params=params)

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended."""
        self._send("DELETE", job_path(job_id), read_nothing)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job."""
        return self._send("POST", job_path(job_id, "/cancel"), read_job)

    def retry(self, job_id: str) -> Job:
        """Run a failed job again from its journal."""
        return self._send("POST", job_path(job_id, "/retry"), read_job)

    def tree(self, job_id: str) -> dict[str, Any]:
        """Return the search tree of a job so far."""
        return self._send("GET", job_path(job_id, "/tree"), read_json)

    def events(self, job_id: str, after: int = 0) -> Iterator[Event]:
        """Yield the job's events from number ``after + 1`` to its end, over new connections where one is lost."""
        cursor = EventCursor(self.url, job_id, after)
        while True:
            try:
                with self._stream(cursor.path, cursor.params, timeout=STREAM_TIMEOUT) as response:
                    for line in response.iter_lines():
                        if (event := cursor.read(line)) is not None:
                            yield event
            except (httpx.TransportError, ServiceError) as error:
                time.sleep(cursor.pause_after(error))
            else:
                if cursor.is_complete(response.status_code):
                    return

    def wait(self, job_id: str) -> Job:
        """Return the job when it has ended."""
        for _ in self.events(job_id):
            pass
        return self.get(job_id)

    def export(
        self,
        *,
        since: float = 0.0,
        status: str | None = None,
        **query: Any,
    ) -> Iterator[str]:
        """Yield the jobs that ended at ``since`` (seconds since 1970) or later, one line of JSON each.

        ``query``: further parameters of ``GET /v1/jobs/export``, such as ``format="sft"`` for training data.
        """
        params = drop_none(since=since, status=status, **query)
        try:
            with self._stream("/v1/jobs/export", params) as response:
                yield from response.iter_lines()
        except httpx.TransportError as error:
            raise ServiceError(f"the export from {self.url} broke off: {error}") from None

    def default_strategy(self) -> str:
        """Return the strategy of jobs that name none."""
        return str((self._send("GET", "/v1/strategies", read_json))["default"])

    def models(self) -> dict[str, Any]:
        """Return the served models, with the defaults of their jobs."""
        return self._send("GET", "/v1/models", read_json)

    def upload_file(self, path: Path, *, purpose: str = "batch") -> dict[str, Any]:
        """Upload a file, such as the requests of a batch. Its ``id`` is the ``input_file_id`` of ``submit_batch``."""
        try:
            with path.open("rb") as file:
                parts = {"purpose": (None, purpose), "file": (path.name, file)}
                return self._send("POST", "/v1/files", read_json, files=parts)
        except OSError as error:
            raise ServiceError(f"{path} cannot be read: {error}", 422) from None

    def list_files(
        self,
        *,
        limit: int = 100,
        after: str | None = None,
        purpose: str | None = None,
    ) -> dict[str, Any]:
        """Return a page of files, newest first."""
        params = drop_none(limit=limit, after=after, purpose=purpose)
        return self._send("GET", "/v1/files", read_json, params=params)

    def file_content(self, file_id: str) -> Iterator[bytes]:
        """Yield the content of a file, such as the results of a batch, in parts."""
        try:
            with self._stream(f"/v1/files/{path_segment(file_id)}/content", {}) as response:
                yield from response.iter_bytes()
        except httpx.TransportError as error:
            raise ServiceError(f"the download from {self.url} broke off: {error}") from None

    def download_file(self, file_id: str, path: Path) -> None:
        """Write the content of a file to ``path``."""
        try:
            with path.open("wb") as target:
                for part in self.file_content(file_id):
                    target.write(part)
        except OSError as error:
            raise ServiceError(f"{path} cannot be written: {error}", 422) from None

    def delete_file(self, file_id: str) -> None:
        """Delete a file."""
        self._send("DELETE", f"/v1/files/{path_segment(file_id)}", read_nothing)

    def submit_batch(self, spec: dict[str, Any]) -> Batch:
        """Submit the lines of a file, or jobs that share a budget: the fields of ``FileBatchSpec`` or ``BatchSpec``."""
        return self._send("POST", "/v1/batches", read_batch, json=spec, headers=idempotency_header())

    def batch(self, batch_id: str) -> Batch:
        """Return a batch and its jobs as they are now."""
        return self._send("GET", f"/v1/batches/{path_segment(batch_id)}", read_batch)

    def list_batches(self, *, limit: int = 20, after: str | None = None) -> dict[str, Any]:
        """Return a page of batches, newest first."""
        return self._send("GET", "/v1/batches", read_json, params=drop_none(limit=limit, after=after))

    def cancel_batch(self, batch_id: str) -> Batch:
        """Cancel all jobs of a batch."""
        return self._send("POST", f"/v1/batches/{path_segment(batch_id)}/cancel", read_batch)

    def create_key(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Make an API key; the response alone contains it."""
        return self._send("POST", "/v1/keys", read_json, json=spec)

    def list_keys(self, *, limit: int = 20, after: str | None = None) -> dict[str, Any]:
        """Return a page of API keys, newest first, without the secrets."""
        return self._send("GET", "/v1/keys", read_json, params=drop_none(limit=limit, after=after))

    def revoke_key(self, key_id: str) -> dict[str, Any]:
        """Revoke an API key."""
        return self._send("DELETE", f"/v1/keys/{path_segment(key_id)}", read_json)

    def _send(self, method: str, path: str, read: Callable[[httpx.Response], T], **options: Any) -> T:
        """Send a request, again while its refusal is transient and it may be repeated, and read the response."""
        for repeats_left in reversed(range(max_repeats(method, options.get("headers", {})) + 1)):
            try:
                return read(self._send_once(method, path, options))
            except ServiceError as error:
                if not error.is_transient or not repeats_left:
                    raise
            time.sleep(PAUSE_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _send_once(self, method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from None
        except ValueError as error:
            raise unserializable(error) from None
        if response.is_error:
            raise refusal(response)
        return response

    @contextlib.contextmanager
    def _stream(self, path: str, params: dict[str, Any], **options: Any) -> Iterator[httpx.Response]:
        with self._http.stream("GET", path, params=params, **options) as response:
            if response.is_error:
                response.read()
                raise refusal(response)
            yield response
