"""Errors of the endpoint ``/mcp`` that arise before the protocol's server: as JSON-RPC errors, like its own."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel
from starlette.types import Scope

from api.conversation.error_format import ErrorFormat
from api.http.problems import ProblemDocument

PATH = "/mcp"
_PARSE_ERROR, _INVALID_REQUEST, _INTERNAL_ERROR = -32700, -32600, -32603


class RpcErrorData(BaseModel):
    type: str
    status: int


class RpcError(BaseModel):
    code: int
    message: str
    data: RpcErrorData


class RpcErrorDocument(BaseModel):
    """An error of JSON-RPC 2.0 about a request whose id was not read."""

    jsonrpc: Literal["2.0"] = "2.0"
    id: None = None
    error: RpcError


def _is_spoken_by(scope: Scope) -> bool:
    return bool(scope["path"] == PATH)


def _write_error(problem: ProblemDocument) -> tuple[int, RpcErrorDocument]:
    kind, status = problem.type.rpartition(":")[2], problem.status
    code = _INTERNAL_ERROR if status >= 500 else _PARSE_ERROR if kind == "malformed-json" else _INVALID_REQUEST
    data = RpcErrorData(type=problem.type, status=status)
    return status, RpcErrorDocument(error=RpcError(code=code, message=problem.detail, data=data))


MCP_ERRORS = ErrorFormat(_is_spoken_by, _write_error)
