"""Middleware that writes problem documents in the format of the API that a client speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import MEDIA_TYPE, ProblemDocument


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """A format of errors. ``write`` returns the status and the body for a problem."""

    is_spoken_by: Callable[[Scope], bool]
    """True for a request whose client reads this format."""
    write: Callable[[ProblemDocument], tuple[int, BaseModel]]


class ErrorFormatMiddleware:
    """Writes each problem document in the first of the formats that its client reads, whoever sent it."""

    def __init__(self, app: ASGIApp, formats: Sequence[ErrorFormat]) -> None:
        self._app = app
        self._formats = formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        formats = self._formats if scope["type"] == "http" else ()
        error_format = next((known for known in formats if known.is_spoken_by(scope)), None)
        if error_format is None:
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
                await _send_error(start, ProblemDocument.model_validate_json(document), error_format, send)

        await self._app(scope, receive, translating_send)


async def _send_error(start: Message, problem: ProblemDocument, error_format: ErrorFormat, send: Send) -> None:
    status, written = error_format.write(problem)
    body = written.model_dump_json().encode()
    headers = MutableHeaders(scope=start)
    headers["content-type"], headers["content-length"] = "application/json", str(len(body))
    if status == HTTPStatus.CONFLICT:
        headers["x-should-retry"] = "false"  # the clients of OpenAI and Anthropic would repeat a 409
    await send({**start, "status": status})
    await send({"type": "http.response.body", "body": body, "more_body": False})
