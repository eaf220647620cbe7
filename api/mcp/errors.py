"""Errors of the endpoint ``/mcp`` that arise before the protocol's server: as JSON-RPC errors, like its own."""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import MEDIA_TYPE

PATH = "/mcp"
_PARSE_ERROR, _INVALID_REQUEST, _INTERNAL_ERROR = -32700, -32600, -32603


class McpErrorMiddleware:
    """Translates problem documents on the path of the protocol, whichever part of the application sent them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
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
    kind, status = problem["type"].rpartition(":")[2], problem["status"]
    code = _INTERNAL_ERROR if status >= 500 else _PARSE_ERROR if kind == "malformed-json" else _INVALID_REQUEST
    error = {"code": code, "message": problem["detail"], "data": {"type": problem["type"], "status": status}}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    headers = MutableHeaders(scope=start)
    headers["content-type"], headers["content-length"] = "application/json", str(len(body))
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
