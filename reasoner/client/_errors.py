"""The exception of the clients, and how it is made from a response or a failed connection."""

from __future__ import annotations

import json

import httpx

_TRANSIENT_CODES = frozenset({"broker-unavailable", "shutting-down"})
"""Codes of the problems of a service that can answer again in a moment."""


class ServiceError(Exception):
    """The service refused a request or cannot be reached. The message is the service's own where there is one.

    ``status`` is the HTTP status of the refusal, 422 also for a request that could not be built, or None if no response
    arrived. ``is_transient`` says that the same request may succeed a moment later.
    """

    def __init__(self, message: str, status: int | None = None, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_transient = is_transient


def refusal(response: httpx.Response) -> ServiceError:
    """Return the error that a response describes: by a problem document, or in OpenAI's form on its paths."""
    is_transient = False
    try:
        problem = json.loads(response.content)
        if "error" in problem:
            error = problem["error"]
            code, message = (error["code"] or "").replace("_", "-"), error["message"]
        else:
            code = problem.get("type", "").removeprefix("urn:reasoner:problem:")
            message = problem.get("detail") or problem["title"]
        is_transient = code in _TRANSIENT_CODES
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"HTTP {response.status_code} from {response.request.url}"
    return ServiceError(message, response.status_code, is_transient=is_transient)


def unreachable(url: str, error: httpx.TransportError) -> ServiceError:
    """Return the error for a request that got no response."""
    return ServiceError(
        f"no service answers at {url} ({error}): start one with 'reasoner serve', or give the address of a running one"
    )


def unserializable(error: ValueError) -> ServiceError:
    """Return the error for a body that has no JSON form."""
    return ServiceError(
        f"the request cannot be written as JSON ({error}): use finite numbers, and text that UTF-8 can encode", 422
    )
