"""Requests of the clients: options of the connection, addresses, and the reading of answers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from engine.remote.proxies import InvalidProxy, client_options
from reasoner.client._errors import ServiceError
from reasoner.jobs.batch import Batch
from reasoner.jobs.job import Job
from reasoner.jobs.verifier_specs import accept_unknown_verifiers

Json = dict[str, Any]

CONNECT_SECONDS = 5.0
RESPONSE_SECONDS = 30.0
MAX_REPEATS = 5
"""Times that a request is sent again while its refusal is transient."""
PAUSE_SECONDS = 1.0
"""Seconds before a request is sent again."""


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


def max_repeats(method: str, headers: Mapping[str, str]) -> int:
    """Return how often a request may be sent again: 0 if the service could then do the same thing twice."""
    return MAX_REPEATS if method == "GET" or "Idempotency-Key" in headers else 0


def read_job(response: httpx.Response) -> Job:
    """Return the job that a response describes, also if the package of its verifier is not installed here."""
    with accept_unknown_verifiers():
        return Job.model_validate(response.json())


def read_batch(response: httpx.Response) -> Batch:
    """Return the batch that a response describes."""
    return Batch.model_validate(response.json())


def read_json(response: httpx.Response) -> Json:
    """Return the object that a response holds."""
    document: Json = response.json()
    return document


def read_nothing(_: httpx.Response) -> None:
    """Return nothing, for a response without a body."""


def job_path(job_id: str, suffix: str = "") -> str:
    """Return the path of a job, or of what lies below it."""
    return f"/v1/jobs/{path_segment(job_id)}{suffix}"


def path_segment(text: str) -> str:
    """Return an id as one segment of a path, whatever it contains: ``../keys`` must not become another address."""
    return quote(text, safe="").replace(".", "%2E")


def idempotency_header(key: str | None = None) -> dict[str, str]:
    """Return the header that makes a request safe to repeat; its key is drawn if none is given."""
    return {"Idempotency-Key": key or uuid.uuid4().hex}


def drop_none(**params: Any) -> dict[str, Any]:
    """Return the parameters that have a value."""
    return {name: value for name, value in params.items() if value is not None}
