"""The calls of the API: each function builds one request and says how its response is read. Nothing is sent here."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from engine.client.proxies import InvalidProxy, client_options
from reasoner.client._errors import ServiceError
from reasoner.jobs.batch import Batch
from reasoner.jobs.job import Job
from reasoner.jobs.verifier_specs import accept_unknown_verifiers

Json = dict[str, Any]
T = TypeVar("T")

CONNECT_SECONDS = 5.0
RESPONSE_SECONDS = 30.0
MAX_REPEATS = 5
"""Times that a request is sent again while its refusal is transient."""
PAUSE_SECONDS = 1.0
"""Seconds before a request is sent again."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request and ``read``, which turns its successful response into the result of the call."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    params: dict[str, Any] = field(default_factory=dict)
    json: Json | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def max_repeats(self) -> int:
        """Times that the request may be sent again: 0 if the service could then do the same thing twice."""
        return MAX_REPEATS if self.method == "GET" or "Idempotency-Key" in self.headers else 0

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``httpx.Client.request``."""
        body = {"params": self.params, "json": self.json, "headers": self.headers}
        return {"method": self.method, "url": self.path, **body}


def connection_options(url: str, key: str | None, transport: object | None) -> dict[str, Any]:
    """Return the keyword arguments of ``httpx.Client``.

    ``transport`` replaces the network, and with it proxies. Raises ``ServiceError`` for a malformed address, key or
    proxy of the environment.
    """
    if not re.match(r"https?://[^/]", url):
        raise ServiceError(f"{url!r} is not the address of a service: give http://HOST:PORT or https://HOST", 422)
    if not re.fullmatch(r"[!-~]*", key or ""):
        raise ServiceError("an API key has printable ASCII characters only and no spaces: check the one given", 422)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(RESPONSE_SECONDS, connect=CONNECT_SECONDS)
    options = {"base_url": url, "headers": headers, "timeout": timeout}
    if transport is not None:
        return {**options, "trust_env": False, "transport": transport}
    try:
        return options | client_options(url)
    except InvalidProxy as error:
        raise ServiceError(str(error), 422) from None


def submit(spec: Json, idempotency_key: str | None = None) -> Call[Job]:
    return Call("POST", "/v1/jobs", _read_job, json=spec, headers=_idempotency_key(idempotency_key))


def select(question: str, candidates: Sequence[Any], fields: Json) -> Call[Job]:
    spec = {"problem": question, "candidates": list(candidates), **fields}
    return Call("POST", "/v1/select", _read_job, json=spec, headers=_idempotency_key())


def get(job_id: str) -> Call[Job]:
    return Call("GET", _job_path(job_id), _read_job)


def list_jobs(limit: int, after: str | None, status: str | None) -> Call[Json]:
    return Call("GET", "/v1/jobs", _read_json, params=_without_none(limit=limit, after=after, status=status))


def delete(job_id: str) -> Call[None]:
    return Call("DELETE", _job_path(job_id), _read_nothing)


def cancel(job_id: str) -> Call[Job]:
    return Call("POST", _job_path(job_id, "/cancel"), _read_job)


def retry(job_id: str) -> Call[Job]:
    return Call("POST", _job_path(job_id, "/retry"), _read_job)


def tree(job_id: str) -> Call[Json]:
    return Call("GET", _job_path(job_id, "/tree"), _read_json)


def export(since: float, status: str | None, journal: bool) -> Call[None]:
    params = _without_none(since=since, status=status, journal=journal)
    return Call("GET", "/v1/jobs/export", _read_nothing, params=params)


def events(job_id: str, after: int) -> Call[None]:
    return Call("GET", _job_path(job_id, "/events"), _read_nothing, params={"starting_after": after})


def strategies() -> Call[Json]:
    return Call("GET", "/v1/strategies", _read_json)


def models() -> Call[Json]:
    return Call("GET", "/v1/models", _read_json)


def submit_batch(spec: Json) -> Call[Batch]:
    return Call("POST", "/v1/batches", _read_batch, json=spec, headers=_idempotency_key())


def batch(batch_id: str) -> Call[Batch]:
    return Call("GET", f"/v1/batches/{_segment(batch_id)}", _read_batch)


def list_batches(limit: int, after: str | None) -> Call[Json]:
    return Call("GET", "/v1/batches", _read_json, params=_without_none(limit=limit, after=after))


def cancel_batch(batch_id: str) -> Call[Batch]:
    return Call("POST", f"/v1/batches/{_segment(batch_id)}/cancel", _read_batch)


def create_key(spec: Json) -> Call[Json]:
    return Call("POST", "/v1/keys", _read_json, json=spec)


def list_keys(limit: int, after: str | None) -> Call[Json]:
    return Call("GET", "/v1/keys", _read_json, params=_without_none(limit=limit, after=after))


def revoke_key(key_id: str) -> Call[Json]:
    return Call("DELETE", f"/v1/keys/{_segment(key_id)}", _read_json)


def _read_job(response: httpx.Response) -> Job:
    with accept_unknown_verifiers():
        return Job.model_validate(response.json())


def _read_batch(response: httpx.Response) -> Batch:
    return Batch.model_validate(response.json())


def _read_json(response: httpx.Response) -> Json:
    document: Json = response.json()
    return document


def _read_nothing(_: httpx.Response) -> None:
    return None


def _job_path(job_id: str, suffix: str = "") -> str:
    return f"/v1/jobs/{_segment(job_id)}{suffix}"


def _segment(text: str) -> str:
    """Return an id as one segment of a path, whatever it contains: ``../keys`` must not become another address."""
    return quote(text, safe="").replace(".", "%2E")


def _idempotency_key(key: str | None = None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid.uuid4().hex}


def _without_none(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}
