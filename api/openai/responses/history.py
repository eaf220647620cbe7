"""The earlier part of a response's conversation: a previous response, and items that are named by their ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

from api.http.principal import Principal
from api.http.problems import Problem
from api.http.state import ServiceState
from api.openai.functions import FunctionCallItem, FunctionOutputItem, build_call_item, build_calls
from api.openai.responses.body import EchoedFields, InputCall, InputItem, InputMessage, InputOutput, ItemReference
from api.openai.responses.items import InputTurn, list_items
from reasoner.answers.extraction.extract import strip_thinking
from reasoner.jobs.job import JobResult
from reasoner.jobs.messages import Message, MessageCall
from reasoner.jobs.spec import read_conversation
from workers.store.jobs import NoSuchJob
from workers.store.serialization import JobDocument

_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
_ITEM_ID = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})(?:_\d+)*")


async def get_job(response_id: str, state: ServiceState, principal: Principal) -> JobDocument:
    """Return the job of a response. Raises ``Problem`` if there is none that the caller may see."""
    job_id = f"job_{response_id.removeprefix('resp_')}"
    try:
        if not _RESPONSE_ID.fullmatch(response_id):
            raise NoSuchJob(response_id)
        await state.store.check_owner(job_id, principal.visible_owner)
        return await state.store.get(job_id)
    except NoSuchJob:
        raise Problem(404, "no-such-response", f"there is no response {response_id!r}") from None


async def load_echoed_fields(state: ServiceState, job_id: str) -> EchoedFields:
    """Return the fields stored beside the job, or defaults for a job of another route."""
    stored = await state.store.get_form(job_id)
    return EchoedFields() if stored is None else EchoedFields.model_validate_json(stored)


async def load_conversation(response_id: str, state: ServiceState, principal: Principal) -> list[Message]:
    """Return the conversation of a response, with its answer as the last turn."""
    field = "previous_response_id"
    try:
        job = await get_job(response_id, state, principal)
    except Problem as problem:
        raise Problem(problem.status_code, problem.code, problem.detail, errors=[(field, problem.detail)]) from None
    result = _read_result(job)
    calls = [MessageCall(**call.model_dump()) for call in build_calls(job["id"], result.tool_calls if result else ())]
    answer = _read_answer(result)
    if not answer and not calls:
        message = f"{response_id} is {job['status']} and has no text to continue from: name a completed response"
        raise Problem(422, "invalid-request", f"{field}: {message}", errors=[(field, message)])
    turns = [Message.model_validate(turn) for turn in read_conversation(job["spec"])]
    has_instructions = (await load_echoed_fields(state, job["id"])).instructions is not None
    return [*turns[has_instructions:], Message(role="assistant", content=answer or None, tool_calls=calls)]


async def resolve_references(items: Sequence[InputItem], state: ServiceState, principal: Principal) -> list[InputItem]:
    """Return the items with what their references name. Raises ``Problem`` for one that names nothing."""
    loaded: dict[str, dict[str, InputItem | None]] = {}
    resolved = []
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            match = _ITEM_ID.fullmatch(item.id)
            job_id = match[1] if match else ""
            if match and job_id not in loaded:
                loaded[job_id] = await _load_items(job_id, state, principal)
            if item.id not in loaded.get(job_id, {}):
                detail = (
                    f"there is no item {item.id!r}: send the item itself; it may have been deleted with its response"
                )
                raise Problem(404, "no-such-item", detail, errors=[(f"input.{index}.id", detail)])
            item = loaded[job_id][item.id] or item
        resolved.append(item)
    return resolved


async def _load_items(digits: str, state: ServiceState, principal: Principal) -> dict[str, InputItem | None]:
    """Return the items of a response and of its input by their ids, if there is one; ``None`` for its reasoning."""
    try:
        job = await get_job(f"resp_{digits}", state, principal)
    except Problem:
        return {}
    result = _read_result(job)
    items: dict[str, InputItem | None] = {
        item.id: _to_input(item) for item in list_items(job, await load_echoed_fields(state, job["id"]))
    }
    items[f"rs_{digits}"] = None
    if answer := _read_answer(result):
        items[f"msg_{digits}"] = InputMessage(role="assistant", content=answer)
    calls = [build_call_item(job["id"], index, call) for index, call in enumerate(result.tool_calls if result else ())]
    return items | {call.id: _to_input(call) for call in calls}


def _to_input(item: InputTurn | FunctionCallItem | FunctionOutputItem) -> InputItem:
    match item:
        case FunctionCallItem():
            return InputCall(type="function_call", call_id=item.call_id, name=item.name, arguments=item.arguments)
        case FunctionOutputItem():
            return InputOutput(type="function_call_output", call_id=item.call_id, output=item.output)
        case InputTurn():
            return InputMessage(role=item.role, content="".join(part.text for part in item.content))


def _read_result(job: JobDocument) -> JobResult | None:
    return JobResult.model_validate(job["result"]) if job["result"] else None


def _read_answer(result: JobResult | None) -> str:
    """Return the text of a result without its thought."""
    if result is None:
        return ""
    return (result.content if result.content is not None else strip_thinking(result.text or "")) or ""
