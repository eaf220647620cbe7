"""Endpoints of batches: how a line's body becomes a job, and an ended job the body of an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from api.anthropic import errors as anthropic_errors
from api.anthropic.body import MessagesBody
from api.anthropic.events import MessageReader
from api.anthropic.job import build_job
from api.conversation.failures import failure_problem
from api.conversation.narration import Narration
from api.conversation.sent_fields import naming_sent_fields
from api.http.principal import Principal
from api.http.problems import Problem, problem_document, validation_problem
from api.http.state import ServiceState
from api.openai.chat.answer import build_completion
from api.openai.chat.body import ChatBody
from api.openai.errors import describe_error
from api.openai.responses.body import EchoedFields, ResponseBody
from api.openai.responses.history import load_conversation, resolve_references
from api.openai.responses.object import Response
from reasoner.jobs.events import Event
from reasoner.jobs.request import JobRequest
from workers.store.serialization import JobDocument

Json = dict[str, Any]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The job of a line: how to build it, the fields of the body by those of the job, and ``form`` as of ``submit``."""

    build: Callable[[], JobRequest]
    sent_fields: Mapping[str, str] = field(default_factory=dict)
    form: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Functions of one endpoint.

    ``read`` returns the request of a body. ``answer`` returns the endpoint's answer about an ended job, from its
    document, its events, the body, and its form. Both raise ``Problem``; ``describe`` returns its status and body.
    """

    read: Callable[[Json, ServiceState, Principal], Awaitable[LineRequest]]
    answer: Callable[[JobDocument, Sequence[Event], Json, str | None], Json]
    describe: Callable[[Problem, str], tuple[int, Json]]


async def _read_job(body: Json, _: ServiceState, __: Principal) -> LineRequest:
    request = _parse_body(JobRequest, body)
    return LineRequest(lambda: request)


def _answer_job(job: JobDocument, _: Sequence[Event], __: Json, ___: str | None) -> Json:
    return job


async def _read_chat(body: Json, state: ServiceState, _: Principal) -> LineRequest:
    request = _parse_body(ChatBody, body)
    turns = request.to_turns()
    messages, served = [turn.message for turn in turns], await state.catalog.list_known()
    return LineRequest(lambda: request.to_job(messages, state.settings, served), request.sent_fields(turns))


def _answer_chat(job: JobDocument, events: Sequence[Event], body: Json, _: str | None) -> Json:
    request = _parse_body(ChatBody, body)
    summary = request.reasoning.summary if request.reasoning else None
    narration = _narrate(job, events, concise=summary == "concise")
    end = narration.end
    if end is None or end.result is None or end.status == "cancelled":
        raise failure_problem(end)
    return build_completion(job, narration, end, request.reasoning_content).model_dump()


async def _read_response(body: Json, state: ServiceState, principal: Principal) -> LineRequest:
    request = _parse_body(ResponseBody, body)
    previous = request.previous_response_id
    history = [] if previous is None else await load_conversation(previous, state, principal)
    turns = request.to_turns(history, await resolve_references(request.input, state, principal))
    messages, served = [turn.message for turn in turns], await state.catalog.list_known()
    form = request.echoed_fields.model_dump_json()
    return LineRequest(lambda: request.to_job(messages, state.settings, served), request.sent_fields(turns), form)


def _answer_response(job: JobDocument, events: Sequence[Event], _: Json, form: str | None) -> Json:
    echoed = EchoedFields() if form is None else EchoedFields.model_validate_json(form)
    narration = _narrate(job, events, concise=echoed.summary == "concise")
    return Response.from_job(job, echoed, narration).model_dump()


async def _read_message(body: Json, state: ServiceState, _: Principal) -> LineRequest:
    request = _parse_body(MessagesBody, body)
    turns = request.to_turns()
    sent_fields = request.sent_fields(turns)
    with naming_sent_fields(sent_fields):
        job = await build_job(request, turns, state)
    return LineRequest(lambda: job, sent_fields)


def _answer_message(job: JobDocument, events: Sequence[Event], body: Json, _: str | None) -> Json:
    request = _parse_body(MessagesBody, body)
    reader = MessageReader(job, request.display, request.reasoning_content)
    for event in events:
        reader.add(event)
    return reader.build_message().model_dump()


def _describe_openai(problem: Problem, _: str) -> tuple[int, Json]:
    status, document = describe_error(problem)
    return status, document.model_dump()


def _describe_anthropic(problem: Problem, request_id: str) -> tuple[int, Json]:
    status, document = anthropic_errors.describe_error(problem, request_id)
    return status, document.model_dump()


def _describe_own(problem: Problem, request_id: str) -> tuple[int, Json]:
    return problem.status_code, problem_document(problem, request_id)


ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(_read_chat, _answer_chat, _describe_openai),
    "/v1/responses": Endpoint(_read_response, _answer_response, _describe_openai),
    anthropic_errors.PREFIX: Endpoint(_read_message, _answer_message, _describe_anthropic),
    "/v1/jobs": Endpoint(_read_job, _answer_job, _describe_own),
}


def has_answer(job: JobDocument) -> bool:
    """Return True if an ended job is an answer, even if it says that there was none to be found."""
    return job["status"] in ("completed", "incomplete")


def check_endpoint(name: str) -> None:
    """Raise ``Problem`` for an endpoint that batches do not have."""
    if name not in ENDPOINTS:
        message = f"there are no batches of {name!r}: give {', '.join(ENDPOINTS)}"
        raise Problem(HTTPStatus.BAD_REQUEST, "unknown-endpoint", message, errors=[("endpoint", message)])


def _parse_body(model: type[M], body: Json) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        parts = [{**part, "loc": ("body", *part["loc"])} for part in error.errors()]
        raise validation_problem(parts, body, model) from None


def _narrate(job: JobDocument, events: Sequence[Event], *, concise: bool) -> Narration:
    narration = Narration(job["spec"], concise=concise)
    for event in events:
        narration.add(event)
    return narration
