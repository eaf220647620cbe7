"""Errors and headers in Anthropic's format."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Literal

from pydantic import BaseModel, Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.conversation.error_format import ErrorFormat
from api.http.limits import RequestsLeft
from api.http.problems import Problem, ProblemDocument, problem_document

PREFIX = "/v1/messages"
OVERLOADED = 529
"""Anthropic's status of a service that cannot answer now; its clients try again."""
_SHARED_PATHS = ("/v1/models", "/v1/complete", "/v1/files", "/v1/skills", "/v1/organizations")
"""Paths of which other clients have some, too: these are Anthropic's if the request names its version."""
_STATUS = {
    HTTPStatus.UNPROCESSABLE_ENTITY: HTTPStatus.BAD_REQUEST,
    HTTPStatus.SERVICE_UNAVAILABLE: OVERLOADED,
}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""Codes of refused fields without which clients then try again, by the field."""


class AnthropicError(BaseModel):
    """Anthropic's error object. The message begins with the wrong field, if there is one."""

    type: str
    message: str
    details: dict[str, str] | None = Field(None, exclude_if=lambda details: details is None)
    """A code that clients know, for errors that have one."""


class AnthropicErrorDocument(BaseModel):
    """The body of every error."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str | None


def is_anthropic_path(path: str) -> bool:
    """Return True if a path is Anthropic's alone, with its subpaths."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def stream_error(problem: Problem, request_id: str | None) -> AnthropicErrorDocument:
    """Return the event of an error inside a stream, whose status has been sent already."""
    status = _find_status(problem.status_code, problem.code)
    error = AnthropicError(type=_find_type(status), message=problem.detail)
    return AnthropicErrorDocument(error=error, request_id=request_id)


def describe_error(problem: Problem, request_id: str) -> tuple[int, AnthropicErrorDocument]:
    """Return the HTTP status and the body of an error."""
    return _write_error(ProblemDocument.model_validate(problem_document(problem, request_id)))


def _is_spoken_by(scope: Scope) -> bool:
    path = scope["path"]
    is_shared = any(path == shared or path.startswith(f"{shared}/") for shared in _SHARED_PATHS)
    return is_anthropic_path(path) or (is_shared and "anthropic-version" in Headers(scope=scope))


def _write_error(problem: ProblemDocument) -> tuple[int, AnthropicErrorDocument]:
    status = _find_status(problem.status, problem.type.rpartition(":")[2])
    details = next((_DETAILS[part.field] for part in problem.errors if part.field in _DETAILS), None)
    error = AnthropicError(type=_find_type(status), message=problem.detail, details=details)
    return status, AnthropicErrorDocument(error=error, request_id=problem.request_id)


def _find_status(status: int, code: str) -> int:
    return HTTPStatus.NOT_FOUND if code == "unknown-model" else _STATUS.get(HTTPStatus(status), status)


def _find_type(status: int) -> str:
    if status in _TYPES:
        return _TYPES[status]
    return "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"


ANTHROPIC_ERRORS = ErrorFormat(_is_spoken_by, _write_error)


class AnthropicHeadersMiddleware:
    """Adds the id of the request, and what is left of its key's rate, in the headers that Anthropic's clients read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_spoken_by(scope):
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers.get("x-request-id", "")
                left: RequestsLeft | None = scope.get("state", {}).get("requests_left")
                if left is not None:
                    reset = datetime.fromtimestamp(time.time() + left.full_seconds, UTC)
                    headers["anthropic-ratelimit-requests-limit"] = str(left.burst)
                    headers["anthropic-ratelimit-requests-remaining"] = str(left.left)
                    headers["anthropic-ratelimit-requests-reset"] = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
            await send(message)

        await self._app(scope, receive, send_with_headers)
