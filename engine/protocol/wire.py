"""Conversion of results, tokens and errors to and from JSON, shared by server and client."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter

from engine.protocol.request_checks import PromptTooLong, has_ids
from engine.protocol.types import (
    Capability,
    Completion,
    Delta,
    EngineBusy,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelInfo,
    NotSupported,
    ScoreResult,
    TextToken,
    Token,
    Tokens,
)

Json = dict[str, Any]
JsonToken = int | str | list[str]
"""A token's id or text; that of a thought is in a list."""

_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY)
"""Refusals after which the same request may succeed."""

_TOO_LONG = "context_length_exceeded"
"""OpenAI's code of a prompt that leaves no room in the context; clients shorten it or turn to a larger model."""

read_completion = TypeAdapter(Completion).validate_python
read_delta = TypeAdapter(Delta).validate_python
read_score_results = TypeAdapter(list[ScoreResult]).validate_python
read_models = TypeAdapter(list[ModelInfo]).validate_python
"""Return the result with the fields of a JSON value; unknown fields are ignored. Raise ``ValueError``."""


def write_tokens(tokens: Tokens) -> list[JsonToken]:
    """Return tokens that follow a prompt as JSON."""
    return [token if isinstance(token, int) else _write_text(token) for token in tokens]


def read_tokens(values: Sequence[JsonToken], prompt: Tokens) -> Tokens:
    """Return tokens that ``write_tokens`` wrote, or an earlier version.

    ``prompt``: the tokens before them. Where these are texts, numbers are no ids: earlier versions packed texts into
    them.
    """
    packed = [] if has_ids(prompt[:1]) else [value for value in values if isinstance(value, int)]
    return tuple(_unpack(packed)) if packed else tuple(map(_read_token, values))


def _write_text(token: Token) -> JsonToken:
    assert isinstance(token, TextToken)  # conversations are in prompts alone
    return [token.text] if token.is_thought else token.text


def _read_token(value: JsonToken) -> Token:
    if isinstance(value, int):
        return value
    return TextToken(value) if isinstance(value, str) else TextToken(value[0], is_thought=True)


def _unpack(values: Sequence[int]) -> Iterator[TextToken]:
    """Yield the texts of numbers whose bytes are a mark, 2 for a thought, and a piece of UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for value in values:
        mark, *piece = value.to_bytes((value.bit_length() + 7) // 8, "big")
        yield TextToken(decoder.decode(bytes(piece)), is_thought=mark == 2)


def write_model(info: ModelInfo) -> Json:
    """Return a model's properties. ``lacks`` are the capabilities that its server does not have."""
    capabilities = [each for each in Capability if each in info.capabilities]
    lacks = [each for each in Capability if each not in info.capabilities]
    return asdict(info) | {"capabilities": capabilities, "lacks": lacks}


def error_to_json(error: EngineError) -> tuple[int, Json]:
    """Return the HTTP status of an error and its body in OpenAI's shape."""
    param, kind = None, "server_error"
    if isinstance(error, InvalidRequest):
        param, kind = error.field, "invalid_request_error"
        status, code = (404, "model_not_found") if param == "model" else (400, "invalid_value")
        code = _TOO_LONG if isinstance(error, PromptTooLong) else code
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


def error_from_json(
    status: int, value: Any, *, source: str = "the engine", retry_after: float | None = None
) -> EngineError:
    """Return the exception for a response with an error status, with the server's own words.

    ``source``: names the server. ``retry_after``: the seconds of the header ``Retry-After``.
    """
    error = value.get("error") if isinstance(value, dict) else None
    if error is None and isinstance(value, dict):  # servers that keep FastAPI's shape, or have the fields on top
        error = value.get("detail") or (value if isinstance(value.get("message"), str) else None)
    if not isinstance(error, dict):
        error = {"message": str(error)} if error else {}
    message, code, param = error.get("message"), error.get("code"), error.get("param")
    if code == "engine_busy" or status == HTTPStatus.TOO_MANY_REQUESTS:
        return EngineBusy(str(message or f"{source} has no capacity for the moment (429)"), retry_after)
    # LiteLLM's proxy looks a key that is not its master key up in its database, and says only that it has none.
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) or error.get("type") == "no_db_connection":
        return EngineError(
            f"{source} refused the request's API key ({status}: {message or 'no explanation'}): set the key of that "
            "server, by REASONER_ENGINE_API_KEY or the api_key_env or api_key_file of its table in reasoner.toml"
        )
    if status == HTTPStatus.NOT_FOUND:
        is_model = param == "model" or "model" in str(message).lower()
        if is_model:
            return InvalidRequest(str(message), "model")
        return NotSupported(f"{source} has no such function ({message or 'Not Found'}): is it the right address?")
    if status in _PASSING or (status >= HTTPStatus.INTERNAL_SERVER_ERROR and code != "engine_error"):
        return EngineUnavailable(
            str(message or f"{source} answered with status {status} and no explanation"), retry_after
        )
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return EngineError(str(message))
    refused = PromptTooLong if code == _TOO_LONG else InvalidRequest
    return refused(str(message or f"{source} refused the request with status {status}"), param)


def stream_error(value: Json, source: str) -> EngineError:
    """Return the exception for an error inside a stream, whose object has the status as its code, or tells it by its
    type.
    """
    error = value.get("error")
    error = error if isinstance(error, dict) else {}
    code, is_refusal = error.get("code"), error.get("type") == "invalid_request_error"
    status = int(str(code)) if str(code).isdigit() else 400 if is_refusal else 500
    if not 400 <= status < 600:
        status = 500
    return error_from_json(status, value, source=source)
