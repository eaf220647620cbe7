"""Conversion of results and errors to and from JSON, shared by server and client."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine.protocol.types import (
    Completion,
    Delta,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelInfo,
    ScoreResult,
    TokenLogprob,
)

Json = dict[str, Any]


def completion_to_json(completion: Completion) -> Json:
    """Return the fields of a ``Completion``."""
    return asdict(completion)


def completion_from_json(value: Json) -> Completion:
    """The inverse of ``completion_to_json``."""
    prompt = value.get("prompt_logprobs")
    return Completion(
        **{
            **value,
            "token_ids": tuple(value["token_ids"]),
            "logprobs": _logprobs_from_json(value.get("logprobs")),
            "prompt_logprobs": None if prompt is None else (None, *(_logprobs_from_json(prompt[1:]) or ())),
        }
    )


def delta_from_json(value: Json) -> Delta:
    """Return the ``Delta`` with these fields."""
    logprobs = _logprobs_from_json(value.get("logprobs"))
    return Delta(**{**value, "token_ids": tuple(value["token_ids"]), "logprobs": logprobs})


def _logprobs_from_json(values: list[Json] | None) -> tuple[TokenLogprob, ...] | None:
    if values is None:
        return None
    return tuple(
        TokenLogprob(**{**value, "top": tuple((token, logprob) for token, logprob in value["top"])}) for value in values
    )


def score_from_json(value: Json) -> ScoreResult:
    """Return the ``ScoreResult`` with these fields."""
    rows = value["values"]
    return ScoreResult(**{**value, "values": None if rows is None else tuple(tuple(row) for row in rows)})


def model_from_json(value: Json) -> ModelInfo:
    """Return the model of an entry of ``/v1/models``."""
    fields = ("id", "kind", "context", "vocab_size", "parameters", "architecture", "bos", "extra", "fingerprint")
    return ModelInfo(**{name: value[name] for name in fields})


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
