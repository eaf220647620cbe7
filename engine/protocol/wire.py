"""Conversion of results and errors to and from JSON, shared by server and client."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from engine.protocol.types import (
    Completion,
    Delta,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelInfo,
    ScoreResult,
)

Json = dict[str, Any]

read_completion = TypeAdapter(Completion).validate_python
read_delta = TypeAdapter(Delta).validate_python
read_score_results = TypeAdapter(list[ScoreResult]).validate_python
read_models = TypeAdapter(list[ModelInfo]).validate_python
"""Return the result with the fields of a JSON value; unknown fields are ignored. Raise ``ValueError``."""


def error_to_json(error: EngineError) -> tuple[int, Json]:
    """Return the HTTP status of an error and its body in OpenAI's shape."""
    param, kind = None, "server_error"
    if isinstance(error, InvalidRequest):
        param, kind = error.field, "invalid_request_error"
        status, code = (404, "model_not_found") if param == "model" else (400, "invalid_value")
    elif isinstance(error, EngineBusy):
        status, code = 429, "engine_busy"
    elif isinstance(error, EngineUnavailable):
        status, code = 503, "engine_unavailable"
    else:
        status, code = 500, "engine_error"
    return status, error_body(str(error), kind, param, code)


def error_body(message: str, kind: str, param: str | None, code: str) -> Json:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_from_json(status: int, value: Any) -> EngineError:
    """Return the exception for a response with an error status."""
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, str):
        error = {"message": error}
    if error is None and isinstance(value, dict) and "detail" in value:
        error = {"message": value["detail"]}  # servers that keep FastAPI's shape
    if not isinstance(error, dict):
        return EngineUnavailable(f"the engine answered with status {status} and no explanation")
    message, code = str(error.get("message")), error.get("code")
    if code == "engine_busy":
        return EngineBusy(message)
    if 400 <= status < 500:
        return InvalidRequest(message, error.get("param"))
    if code == "engine_error":
        return EngineError(message)
    return EngineUnavailable(message)
