"""Middleware that limits the size of request bodies."""

from __future__ import annotations

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.protocol.wire import error_body

MAX_BODY_BYTES = 32 << 20
_MESSAGE = f"the body has more than {MAX_BODY_BYTES} bytes"


class BodyLimit:
    """Refuse a body over the limit with 413, by its announced length or when it grows past it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            response = JSONResponse(error_body(_MESSAGE, "invalid_request_error", None, "too_large"), 413)
            await response(scope, receive, send)
            return
        num_received = 0

        async def receive_limited() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > MAX_BODY_BYTES:
                raise HTTPException(413, _MESSAGE)
            return message

        await self._app(scope, receive_limited, send)
