"""Exceptions as responses in the shape of OpenAI's errors."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.protocol.types import EngineError
from engine.protocol.wire import error_body, error_to_json

_MAX_SHOWN = 4


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(EngineError, _handle_engine_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_error)


async def _handle_engine_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    status, body = error_to_json(error)
    return JSONResponse(body, status, {"Retry-After": "1"} if status in (429, 503) else None)


async def _handle_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields, messages = [], []
    for detail in error.errors():
        location = [str(part) for part in detail["loc"] if part != "body"]
        if detail["type"] == "json_invalid":
            messages.append(f"the body is not valid JSON ({detail['ctx']['error']})")
            continue
        fields.extend(location[:1])
        is_unknown = detail["type"] == "extra_forbidden"
        message = "unknown field" if is_unknown else detail["msg"].removeprefix("Value error, ")
        messages.append(f"{'.'.join(location) or 'body'}: {message}")
    field = fields[0] if fields else None
    return JSONResponse(
        error_body("; ".join(messages[:_MAX_SHOWN]), "invalid_request_error", field, "invalid_value"), 400
    )


async def _handle_http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(error_body(message, "invalid_request_error", None, "http_error"), error.status_code)
