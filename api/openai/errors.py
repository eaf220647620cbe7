"""Errors in OpenAI's format."""

from __future__ import annotations

from http import HTTPStatus

from pydantic import BaseModel
from starlette.types import Scope

from api.conversation.error_format import ErrorFormat
from api.http.problems import Problem, ProblemDocument

_OWN_PATHS = ("/v1/jobs", "/v1/keys", "/v1/select", "/v1/strategies", "/v1/usage", "/v1/verifiers")
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


def is_openai_path(path: str) -> bool:
    """Return True if a path's errors are for OpenAI's clients, also where this service has nothing at it."""
    if path.startswith("/v1/") or path == "/v1":
        return not any(path == own or path.startswith(f"{own}/") for own in _OWN_PATHS)
    return path in _MISPLACED


def _is_spoken_by(scope: Scope) -> bool:
    return is_openai_path(scope["path"])


def _write_error(problem: ProblemDocument) -> tuple[int, ErrorDocument]:
    status, code = HTTPStatus(problem.status), problem.type.rpartition(":")[2]
    error = ErrorBody(
        message=problem.detail,
        type=_find_type(status),
        param=next((part.field for part in problem.errors), None),
        code=_find_code(code),
    )
    return _find_status(status, code), ErrorDocument(error=error)


def _find_status(status: HTTPStatus, problem: str) -> int:
    """Return OpenAI's status of a problem, from its own status and its code."""
    return int(HTTPStatus.NOT_FOUND if problem == "unknown-model" else _STATUS.get(status, status))


def _find_type(status: HTTPStatus) -> str:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def _find_code(problem: str) -> str:
    return _CODES.get(problem, problem.replace("-", "_"))


OPENAI_ERRORS = ErrorFormat(_is_spoken_by, _write_error)
