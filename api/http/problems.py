"""Problem documents (RFC 9457) for every error of the API: what was wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Tag
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path
from starlette.types import Scope

from api.http.operations import list_methods
from reasoner.admission.refusal import JobRefused
from reasoner.budget.spec import Budget
from reasoner.jobs.sampling_spec import Sampling
from reasoner.jobs.verifier_specs import verifier_kinds
from reasoner.strategies.registry import STRATEGIES
from workers.archive.errors import ArchiveDown, ArchiveTooNew
from workers.config.rate_limits import QuotaExceeded
from workers.store.batches import NoSuchBatch
from workers.store.broker_errors import BROKER_DOWN, describe_outage
from workers.store.event_log import ShuttingDown
from workers.store.files import FileInUse, NoSuchFile, StorageFull
from workers.store.jobs import IdempotencyConflict, JobActive, NoSuchJob, NotRetryable, QueueFull
from workers.store.keys import NoSuchKey

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER = {"Retry-After": "1"}


class FieldProblem(BaseModel):
    """A part of the request that was wrong, and what would be right there."""

    field: str
    message: str


class ProblemDocument(BaseModel):
    """The body of every error."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str | None
    errors: list[FieldProblem] = []


class Problem(HTTPException):
    """An error for the client. ``code`` is the end of the document's ``type``, which never changes."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, dict(headers or {}))
        self.code = code
        self.errors = [FieldProblem(field=field, message=message) for field, message in errors]


SHUTTING_DOWN = Problem(
    503,
    "shutting-down",
    "this process is shutting down: send the request again; with the same Idempotency-Key it continues the same job",
    headers=RETRY_AFTER,
)

_STORE_PROBLEMS: dict[type[Exception], tuple[int, str, str]] = {
    NoSuchJob: (404, "no-such-job", "there is no job {0!r}: GET /v1/jobs lists the ids of all jobs"),
    NoSuchBatch: (404, "no-such-batch", "there is no batch {0!r}: GET /v1/batches lists the ids of all batches"),
    NoSuchFile: (404, "no-such-file", "there is no file {0!r}: GET /v1/files lists the ids of all files"),
    FileInUse: (409, "file-in-use", "an unfinished batch reads the file {0}: cancel the batch first"),
    StorageFull: (413, "storage-full", "{0}"),
    NoSuchKey: (404, "no-such-key", "there is no key {0!r}: GET /v1/keys lists the ids of all keys"),
    JobActive: (409, "job-active", "the job has not ended and cannot be deleted: cancel it first"),
    NotRetryable: (409, "not-retryable", "{0}: submit a new job"),
    IdempotencyConflict: (422, "idempotency-conflict", "{0}: use a new Idempotency-Key for a new job"),
    QuotaExceeded: (429, "quota-exceeded", "{0}: try again later"),
    ArchiveDown: (503, "archive-unavailable", "{0}: try again in a moment"),
    ArchiveTooNew: (503, "archive-unavailable", "{0}"),
    QueueFull: (503, "queue-full", "{0}, which is the limit: try again later"),
}
"""Status, code and detail of the problem by the store's error, whose text replaces ``{0}``."""


def broker_problem(error: Exception) -> Problem:
    """Return the problem for one of ``BROKER_DOWN``."""
    detail = f"{describe_outage(error)}: try again in a moment"
    return Problem(503, "broker-unavailable", detail, headers=RETRY_AFTER)


INTERNAL = Problem(500, "internal", "an unexpected error: the log of the service has it under this request id")
"""The problem of an exception that nothing expects."""
BROKER_UNAVAILABLE = broker_problem(ConnectionError())
"""The problem of a broker that does not answer."""


def refusal_problem(refusal: JobRefused) -> Problem:
    """Return the problem document for a refused job."""
    detail = f"body: {refusal.message}" if refusal.field is None else str(refusal)
    return Problem(422, refusal.code, detail, errors=[(refusal.field or "body", refusal.message)])


def find_problem(error: Exception) -> Problem | None:
    """Return the problem for what a submission or the store raised; ``None`` for an error of another kind."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, JobRefused):
        return refusal_problem(error)
    if isinstance(error, ShuttingDown):
        return SHUTTING_DOWN
    if isinstance(error, BROKER_DOWN):
        return broker_problem(error)
    if type(error) not in _STORE_PROBLEMS:
        return None
    status, code, detail = _STORE_PROBLEMS[type(error)]
    retry_after = getattr(error, "retry_after", None)
    headers = None if retry_after is None else {"Retry-After": str(retry_after)}
    return Problem(status, code, detail.format(str(error)), headers=headers)


def problem_response(problem: Problem, request_id: str | None) -> JSONResponse:
    """Return the response with the document of a problem."""
    return JSONResponse(problem_document(problem, request_id), problem.status_code, problem.headers, MEDIA_TYPE)


def problem_document(problem: Problem, request_id: str | None) -> dict[str, Any]:
    """Return the document of a problem."""
    document = ProblemDocument(
        type=f"urn:reasoner:problem:{problem.code}",
        title=HTTPStatus(problem.status_code).phrase,
        status=problem.status_code,
        detail=problem.detail,
        request_id=request_id,
        errors=problem.errors,
    )
    return document.model_dump(exclude={"errors"} if not problem.errors else None)


def refusal_response(scope: Scope, problem: Problem) -> Response:
    """Return the response of a middleware that refuses a request."""
    return problem_response(problem, scope["state"]["request_id"])


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of an application a problem document."""
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    kinds: list[type[Exception]] = [JobRefused, *_STORE_PROBLEMS, ShuttingDown, *BROKER_DOWN]
    for kind in kinds:
        app.add_exception_handler(kind, _on_known_error)


def _respond(request: Request, problem: Problem) -> Response:
    return problem_response(problem, getattr(request.state, "request_id", None))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NO_CONTENT:
        return Response(status_code=error.status_code)
    if not isinstance(error, Problem):
        error = _framework_problem(request, error)
    return _respond(request, error)


def _framework_problem(request: Request, error: HTTPException) -> Problem:
    """Return the problem for an error that the framework raised."""
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        is_known = f"/v1{path}" in list_methods(request.app)
        hint = f"the path is /v1{path}" if is_known else "/docs lists all paths"
        hint = "leave out the last slash" if path.endswith("/") else hint
        return Problem(404, "not-found", f"there is nothing at {path}: {hint}")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        methods = list_methods(request.app)
        matching = [found for template, found in methods.items() if compile_path(template)[0].match(path)]
        # The framework names the methods of one route, and every method of a path is a route of its own.
        allowed = ", ".join(sorted(methods.get(path) or set().union(*matching))) or "GET"
        detail = f"{path} does not take {request.method}: it takes {allowed}"
        return Problem(405, "method-not-allowed", detail, headers={"Allow": allowed})
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    return Problem(error.status_code, code, error.detail, headers=error.headers)


async def _on_known_error(request: Request, error: Exception) -> Response:
    problem = find_problem(error)
    assert problem is not None
    return _respond(request, problem)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    field = getattr(request.scope.get("route"), "body_field", None)
    annotation = None if field is None else field.field_info.annotation
    return _respond(request, validation_problem(error.errors(), error.body, annotation))


def validation_problem(parts: Sequence[Any], sent: Any, annotation: Any) -> Problem:
    """Return the problem of pydantic's errors about what was ``sent`` as a body of the annotated type.

    The location of each begins with the part of the request, such as ``body``.
    """
    errors = []
    for part in parts:
        body, location = _model_in(annotation), part["loc"]
        # A body that is one of several models: the tag behind ``body`` says which.
        if len(location) > 1 and (tagged := _model_with_tag(annotation, str(location[1]))) is not None:
            body, part = tagged, {**part, "loc": (location[0], *location[2:])}
        errors.append((_locate_field(part, sent, body), _write_message(part, body)))
    errors = list(dict.fromkeys(errors))  # members of a union may say the same
    detail = "; ".join(f"{field}: {message}" for field, message in errors)
    return Problem(422, "invalid-request", detail, errors=errors)


def _locate_field(error: Mapping[str, Any], sent: Any, body: type[BaseModel] | None) -> str:
    """Return pydantic's location as a path in the request.

    It has the tags of unions too, which are no fields: in what was ``sent`` they name nothing. Behind a shorthand only
    the schema tells fields from tags.
    """
    location: Sequence[int | str] = error["loc"]
    if location[0] != "body" or sent is None or body is None:
        return ".".join(map(str, location[1:])) or str(location[0])
    path: list[str] = []
    for end, part in enumerate(location[1:], start=1):
        if _is_member(part, sent):
            sent = sent[part]
        elif not isinstance(sent, dict | list):
            if part not in _model_at(location[:end], body).model_fields or str(part) == path[-1]:
                break  # a tag may be the name of the field that has it
        elif error["type"] != "missing" or end < len(location) - 1:
            continue
        path.append(str(part))
    return ".".join(path) or "body"


def _is_member(part: int | str, value: Any) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _write_message(error: Mapping[str, Any], body: type[BaseModel] | None) -> str:
    location: Sequence[int | str] = error["loc"]
    if location == ("body",) and error["type"] != "value_error":
        return "send a JSON object, with Content-Type: application/json"
    if error["type"] == "extra_forbidden" and body is not None:
        model = _model_at(location[:-1], body)
        return f"unknown field; {_find_home(str(location[-1]), model)}known fields: {', '.join(model.model_fields)}"
    if error["type"] == "model_attributes_type" and body is not None:
        first = next(iter(_model_at(location, body).model_fields))
        return f'give a JSON object such as {{"{first}": …}}'
    message: str = error["msg"]
    return message.removeprefix("Value error, ")


def _find_home(name: str, model: type[BaseModel]) -> str:
    """Return a hint for a field of a part of a job that was given beside that part."""
    if "strategy" not in model.model_fields:
        return ""
    for part, kind in (("budget", Budget), ("sampling", Sampling)):
        if part in model.model_fields and name in kind.model_fields:
            return f'{name!r} is a field of {part!r}: write {{"{part}": {{"{name}": …}}}}; '
    example = next((strategy.name for strategy in STRATEGIES.values() if name in strategy.params.model_fields), None)
    if example is None:
        return ""
    return f'{name!r} is a parameter of strategies: write {{"strategy": {{"name": "{example}", "{name}": …}}}}; '


def _model_at(location: Sequence[int | str], body: type[BaseModel]) -> type[BaseModel]:
    """Return the model that is expected at a location in the body."""
    model, annotation = body, None
    for name in location[1:]:
        if isinstance(name, str) and (tagged := _model_with_tag(annotation, name)) is not None:
            model = tagged
        elif isinstance(name, str) and name in model.model_fields:
            annotation = model.model_fields[name].annotation
            model = _model_in(annotation) or model
        elif name in verifier_kinds():
            model = verifier_kinds()[str(name)]
    return model


def _model_with_tag(annotation: Any, tag: str) -> type[BaseModel] | None:
    """Return the model of a union's member in a type annotation, by its tag or by its name."""
    if isinstance(annotation, type):
        return annotation if annotation.__name__ == tag and issubclass(annotation, BaseModel) else None
    inner = get_args(annotation)
    if any(isinstance(part, Tag) and part.tag == tag for part in inner):
        return _model_in(annotation)
    return next((model for part in inner if (model := _model_with_tag(part, tag)) is not None), None)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first model in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
