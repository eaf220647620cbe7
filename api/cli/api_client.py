"""A client of the REST API for the command line: jobs in, events and results out."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from reasoner.jobs.batch import Batch
from reasoner.jobs.event import Event
from reasoner.jobs.job import TERMINAL, Job
from workers.store.keys import Key, NewKey

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
SILENCE_SECONDS = 60.0
"""Longest silence on an event stream; the service sends a comment far more often."""
RECONNECTS = 5
REPEATS = 5
"""Times that a request is sent again while the service says that it cannot answer just now."""
PAUSE_SECONDS = 1.0
_PASSING = frozenset({"urn:reasoner:problem:broker-unavailable", "urn:reasoner:problem:shutting-down"})
"""Refusals that are over in a moment: a broker that answers late on a busy machine, an API that is replaced."""


class ServiceError(Exception):
    """The service refused the request or cannot be reached; the message says what it said."""

    def __init__(self, message: str, status: int | None = None, *, is_passing: bool = False) -> None:
        """``is_passing``: the same request may succeed a moment later."""
        super().__init__(message)
        self.status = status
        self.is_passing = is_passing


class ServiceClient:
    """Talks to a running ``reasoner api``. Use as a context manager."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Raises ``ServiceError`` for what cannot be an address or a key."""
        if not re.match(r"https?://[^/]", url):
            raise ServiceError(f"{url!r} is no address of a service: give http://HOST:PORT or https://HOST", 422)
        if not re.fullmatch(r"[!-~]*", key or ""):
            raise ServiceError("a key is one word of ASCII letters, digits and signs, and what was given is not", 422)
        self.url = url
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def submit(self, spec: dict[str, Any]) -> Job:
        return Job.model_validate(self._json("POST", "/v1/jobs", json=spec, headers=_idempotency_key()))

    def get(self, job_id: str) -> Job:
        return Job.model_validate(self._json("GET", f"/v1/jobs/{_part(job_id)}"))

    def list(self, *, limit: int, after: str | None, status: str | None) -> dict[str, Any]:
        asked = {"limit": limit, "after": after, "status": status}
        return self._json("GET", "/v1/jobs", params={key: value for key, value in asked.items() if value is not None})

    def delete(self, job_id: str) -> None:
        self._answer("DELETE", f"/v1/jobs/{_part(job_id)}")

    def cancel(self, job_id: str) -> Job:
        return Job.model_validate(self._json("POST", f"/v1/jobs/{_part(job_id)}/cancel"))

    def retry(self, job_id: str) -> Job:
        return Job.model_validate(self._json("POST", f"/v1/jobs/{_part(job_id)}/retry"))

    def tree(self, job_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/jobs/{_part(job_id)}/tree")

    def export(self, *, since: float = 0.0, status: str | None = None, journal: bool = False) -> Iterator[str]:
        """Jobs that have ended, a line of JSON each, as they come."""
        asked = {"since": since, "status": status, "journal": journal}
        params = {key: value for key, value in asked.items() if value is not None}
        try:
            with self._http.stream("GET", "/v1/jobs/export", params=params) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                yield from response.iter_lines()
        except httpx.TransportError as error:
            raise ServiceError(f"the export from {self.url} broke off: {error}") from None

    def default_strategy(self) -> str:
        """Return the strategy of jobs that name none."""
        return str(self._json("GET", "/v1/strategies")["default"])

    def submit_batch(self, spec: dict[str, Any]) -> Batch:
        return Batch.model_validate(self._json("POST", "/v1/batches", json=spec, headers=_idempotency_key()))

    def batch(self, batch_id: str) -> Batch:
        return Batch.model_validate(self._json("GET", f"/v1/batches/{_part(batch_id)}"))

    def list_batches(self, *, limit: int, after: str | None) -> dict[str, Any]:
        return self._json("GET", "/v1/batches", params={"limit": limit} | ({} if after is None else {"after": after}))

    def cancel_batch(self, batch_id: str) -> Batch:
        return Batch.model_validate(self._json("POST", f"/v1/batches/{_part(batch_id)}/cancel"))

    def create_key(self, spec: dict[str, Any]) -> NewKey:
        return NewKey.model_validate(self._json("POST", "/v1/keys", json=spec))

    def list_keys(self, *, limit: int, after: str | None) -> dict[str, Any]:
        return self._json("GET", "/v1/keys", params={"limit": limit} | ({} if after is None else {"after": after}))

    def revoke_key(self, key_id: str) -> Key:
        return Key.model_validate(self._json("DELETE", f"/v1/keys/{_part(key_id)}"))

    def events(self, job_id: str, after: int = 0) -> Iterator[Event]:
        """The job's events from number ``after + 1`` to the terminal one; goes on by itself after a lost connection."""
        failures, ended = 0, False
        while True:
            try:
                for event in self._stream(job_id, after):
                    failures, after = 0, event.seq
                    ended = event.type.removeprefix("job.") in TERMINAL
                    yield event
                if ended:  # and the service has nothing more to say: a retried job would go on
                    return
            except httpx.TransportError as error:
                if failures == RECONNECTS:
                    raise ServiceError(f"lost the event stream of {self.url}: {error}") from None
            except ServiceError as error:
                if failures == RECONNECTS or not error.is_passing:
                    raise
                time.sleep(PAUSE_SECONDS)
            failures += 1
            if failures > RECONNECTS:
                raise ServiceError(f"the event stream of {self.url} ends before the job does")

    def wait(self, job_id: str) -> Job:
        """Blocks until the job has ended."""
        for _ in self.events(job_id):
            pass
        return self.get(job_id)

    def _stream(self, job_id: str, after: int) -> Iterator[Event]:
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        params = {"starting_after": after}
        with self._http.stream("GET", f"/v1/jobs/{_part(job_id)}/events", params=params, timeout=timeout) as response:
            if response.status_code == httpx.codes.NO_CONTENT:  # it has ended, with the last event that we have
                return
            if response.status_code != httpx.codes.OK:
                response.read()
                raise _refusal(response)
            for line in response.iter_lines():
                if line.startswith("data:"):
                    yield Event.model_validate_json(line.removeprefix("data:").strip())

    def _json(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        body: dict[str, Any] = self._answer(method, path, **kwargs).json()
        return body

    def _answer(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Send a request, and again while its refusal is passing, if sending it twice does no more than once."""
        repeats = REPEATS if method == "GET" or "headers" in kwargs else 0  # those with an Idempotency-Key
        while True:
            try:
                return self._answer_once(method, path, **kwargs)
            except ServiceError as error:
                if not repeats or not error.is_passing:
                    raise
            repeats -= 1
            time.sleep(PAUSE_SECONDS)

    def _answer_once(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.TransportError as error:
            raise ServiceError(
                f"no service answers at {self.url} ({error}): start one with 'reasoner serve', "
                "or name another with --url"
            ) from None
        except ValueError as error:
            raise ServiceError(
                f"JSON cannot say this ({error}): write finite numbers, and text in UTF-8", 422
            ) from None
        if response.is_error:
            raise _refusal(response)
        return response


def _part(text: str) -> str:
    """An id as one part of a path, whatever it is: ``../keys`` is no job, and must not become the address of keys."""
    return quote(text, safe="").replace(".", "%2E")


def _idempotency_key() -> dict[str, str]:
    return {"Idempotency-Key": uuid.uuid4().hex}


def _refusal(response: httpx.Response) -> ServiceError:
    """What a problem document says, in one line."""
    is_passing = False
    try:
        problem = json.loads(response.content)
        is_passing = problem.get("type") in _PASSING
        message = problem.get("detail") or problem["title"]
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"HTTP {response.status_code} from {response.request.url}"
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message += " (--key, REASONER_API_KEY)"
    return ServiceError(message, response.status_code, is_passing=is_passing)
