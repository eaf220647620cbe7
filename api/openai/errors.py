"""Errors in OpenAI's format: middleware that translates the problem documents of OpenAI's routes."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import MEDIA_TYPE, SHUTTING_DOWN, Problem, broker_problem
from api.openai.narration import JobEnd
from workers.store.broker_errors import BROKER_DOWN
from workers.store.event_log import ShuttingDown

_OWN_PATHS = ("/v1/jobs", "/v1/keys", "/v1/select", "/v1/strategies", "/v1/verifiers")
"""Paths under /v1 that are not OpenAI's, with their subpaths: their errors stay problem documents."""
_MISPLACED = ("/chat/completions", "/responses", "/completions", "/embeddings", "/models")
"""Paths that OpenAI's clients call if the address that they were given lacks /v1."""
_STATUS = {HTTPStatus.UNPROCESSABLE_ENTITY: HTTPStatus.BAD_REQUEST}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_CODES = {
    "context-length-exceeded": "context_length_exceeded",
    "quota-exceeded": "insufficient_quota",
    "rate-limited": "rate_limit_exceeded",
    "unauthorized": "invalid_api_key",
    "unknown-model": "model_not_found",
}


class ErrorBody(BaseModel):
    """OpenAI's error object. ``param`` names the wrong field, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(BaseModel):
    """The body of every error."""

    error: ErrorBody


def stream_error(problem: Problem) -> ErrorBody:
    """Return the body of an error inside a stream, whose status has been sent already."""
    param = next((error.field for error in problem.errors), None)
    kind = _find_type(HTTPStatus(problem.status_code))
    return ErrorBody(message=problem.detail, type=kind, param=param, code=_find_code(problem.code))


def describe_error(problem: Problem) -> tuple[int, ErrorDocument]:
    """Return the HTTP status and the body of an error."""
    status = _find_status(HTTPStatus(problem.status_code), problem.code)
    return status, ErrorDocument(error=stream_error(problem))


DELETED = Problem(409, "deleted", "the job was deleted while it ran")
INTERRUPTIONS = (ShuttingDown, *BROKER_DOWN)
"""Errors for which a stream ends before its job does."""
_JOB_STATUS = {
    **dict.fromkeys(("invalid_request", "context_length_exceeded", "content_filter"), 422),
    "engine_error": 502,
    **dict.fromkeys(("max_attempts", "engine_unavailable"), 503),
}
"""HTTP statuses by the error code of a failed job; any other code is 500."""


def interruption_problem(error: Exception) -> Problem:
    """Return the problem of one of ``INTERRUPTIONS``."""
    return SHUTTING_DOWN if isinstance(error, ShuttingDown) else broker_problem(error)


def name_too_long(message: str) -> str:
    """Return the message of a prompt that is too long, with the words by which LiteLLM and others find it."""
    return f"the prompt is too long: {message}"


def failure_problem(end: JobEnd | None) -> Problem:
    """Return the problem of a job without a result. OpenAI's clients must not repeat a paid search on their own."""
    headers = {"x-should-retry": "false"}
    if end is None:
        return Problem(409, "deleted", "the job was deleted while it ran", headers=headers)
    if end.error is None:
        return Problem(409, "cancelled", "the job was cancelled while it ran", headers=headers)
    code, message = end.error.code, end.error.message
    errors = []
    if code == "context_length_exceeded":
        message = name_too_long(message)
        errors = [("messages", message)]
    return Problem(_JOB_STATUS.get(code, 500), code.replace("_", "-"), message, errors=errors, headers=headers)


def is_openai_path(path: str) -> bool:
    """Return True if a path's errors are for OpenAI's clients, also where this service has nothing at it."""
    if path.startswith("/v1/") or path == "/v1":
        return not any(path == own or path.startswith(f"{own}/") for own in _OWN_PATHS)
    return path in _MISPLACED


class OpenAIErrorMiddleware:
    """Translates problem documents on OpenAI's paths, whichever part of the application sent them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_openai_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        document = b""

        async def translating_send(message: Message) -> None:
            nonlocal start, document
            if message["type"] == "http.response.start" and Headers(scope=message).get("content-type") == MEDIA_TYPE:
                start = message
                return
            if start is None:
                await send(message)
                return
            document += message.get("body", b"")
            if not message.get("more_body", False):
                await _send_error(start, json.loads(document), send)

        await self._app(scope, receive, translating_send)


async def _send_error(start: Message, problem: dict[str, Any], send: Send) -> None:
    status, code = HTTPStatus(problem["status"]), problem["type"].rpartition(":")[2]
    error = ErrorBody(
        message=problem["detail"],
        type=_find_type(status),
        param=next((part["field"] for part in problem.get("errors", ())), None),
        code=_find_code(code),
    )
    body = ErrorDocument(error=error).model_dump_json().encode()
    headers = MutableHeaders(scope=start)
    headers["content-type"], headers["content-length"] = "application/json", str(len(body))
    if status == HTTPStatus.CONFLICT:
        headers["x-should-retry"] = "false"  # OpenAI's clients would repeat a 409
    await send({**start, "status": _find_status(status, code)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _find_status(status: HTTPStatus, problem: str) -> int:
    """Return OpenAI's status of a problem, from its own status and its code."""
    return int(HTTPStatus.NOT_FOUND if problem == "unknown-model" else _STATUS.get(status, status))


def _find_type(status: HTTPStatus) -> str:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def _find_code(problem: str) -> str:
    return _CODES.get(problem, problem.replace("-", "_"))
