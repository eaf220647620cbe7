"""Errors in OpenAI's format: middleware that translates the problem documents of OpenAI's routes."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import MEDIA_TYPE, Problem

PATHS = ("/v1/chat/", "/v1/responses", "/v1/models/")
_STATUS = {HTTPStatus.UNPROCESSABLE_ENTITY: HTTPStatus.BAD_REQUEST}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_CODES = {
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
    """Return the body of a server error inside a stream, whose status has been sent already."""
    return ErrorBody(message=problem.detail, type="server_error", param=None, code=_code(problem.code))


class OpenAIErrorMiddleware:
    """Translates problem documents on OpenAI's paths, whichever part of the application sent them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PATHS):
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
    is_server_error = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    error = ErrorBody(
        message=problem["detail"],
        type="server_error" if is_server_error else _TYPES.get(status, "invalid_request_error"),
        param=next((part["field"] for part in problem.get("errors", ())), None),
        code=_code(code),
    )
    body = ErrorDocument(error=error).model_dump_json().encode()
    if code == "unknown-model":
        status = HTTPStatus.NOT_FOUND
    headers = MutableHeaders(scope=start)
    headers["content-type"], headers["content-length"] = "application/json", str(len(body))
    if status == HTTPStatus.CONFLICT:
        headers["x-should-retry"] = "false"  # OpenAI's clients would repeat a 409
    await send({**start, "status": int(_STATUS.get(status, status))})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _code(problem: str) -> str:
    return _CODES.get(problem, problem.replace("-", "_"))
