"""A batch of messages in Anthropic's format, its requests, and its results."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator

from api.anthropic.errors import PREFIX, AnthropicError, AnthropicErrorDocument
from api.batches.results import find_closing
from reasoner.base_model import StrictModel
from reasoner.jobs.batch import ENDED, MAX_BATCH_LINES
from workers.store.batches import BatchDocument

BATCHES = f"{PREFIX}/batches"
KIND = "msgbatch_"
"""The beginning of ids, behind which are the digits of the batch's own."""
_OWN_KIND = "batch_"


class BatchRequest(StrictModel):
    """A message to be created. ``params`` is the body of ``POST /v1/messages``."""

    custom_id: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]

    @field_validator("params")
    @classmethod
    def _refuse_stream(cls, params: dict[str, Any]) -> dict[str, Any]:
        if params.get("stream"):
            raise ValueError("a message of a batch is in its results, not a stream: leave 'stream' out")
        return params


class NewMessageBatch(StrictModel):
    """Messages that are created when there is room."""

    requests: Annotated[list[BatchRequest], Field(min_length=1, max_length=MAX_BATCH_LINES)]

    @field_validator("requests")
    @classmethod
    def _check_ids_differ(cls, requests: list[BatchRequest]) -> list[BatchRequest]:
        first: dict[str, int] = {}
        for index, request in enumerate(requests):
            if (other := first.setdefault(request.custom_id, index)) != index:
                both = f"requests {other} and {index} have the custom_id {request.custom_id!r}"
                raise ValueError(f"{both}: give each one of its own")
        return requests


class MessageCounts(BaseModel):
    """Requests by how they ended, which is counted when all of them have."""

    processing: int
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(BaseModel):
    """Anthropic's batch object. ``results_url`` is below the address of the service."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None

    @classmethod
    def from_batch(cls, batch: BatchDocument, num_unfinished: int) -> Self:
        """Return the object of a batch. ``num_unfinished``: lines that had not ended when it was closed."""
        status, shown_id = batch["status"], show_id(batch["id"])
        has_ended, canceled_at = status in ENDED, batch["cancelling_at"]
        return cls(
            id=shown_id,
            processing_status="ended" if has_ended else "canceling" if status == "cancelling" else "in_progress",
            request_counts=_count_requests(batch, num_unfinished),
            created_at=_format_time(batch["created_at"]),
            expires_at=_format_time(batch["expires_at"]),
            ended_at=_format_time(batch[f"{status}_at"]) if has_ended else None,
            cancel_initiated_at=None if canceled_at is None else _format_time(canceled_at),
            results_url=f"{BATCHES}/{shown_id}/results" if has_ended else None,
        )


class MessageBatches(BaseModel):
    """A page of batches. ``last_id`` is what ``after_id`` takes to get the next page."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


def show_id(batch_id: str) -> str:
    """Return the id of a batch in this format."""
    return batch_id.replace(_OWN_KIND, KIND, 1)


def find_own_id(shown_id: str) -> str:
    """The inverse of ``show_id``."""
    return shown_id.replace(KIND, _OWN_KIND, 1)


def build_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request from that of its line."""
    response, shown = result["response"], dict[str, Any]()
    if response is not None and response["status_code"] == HTTPStatus.OK:
        shown = {"type": "succeeded", "message": response["body"]}
    elif response is not None:
        shown = {"type": "errored", "error": response["body"]}
    elif (closing := find_closing(result)) is not None:
        shown = {"type": "expired" if closing == "expired" else "canceled"}
    else:
        error = AnthropicError(type="invalid_request_error", message=result["error"]["message"])
        shown = {"type": "errored", "error": AnthropicErrorDocument(error=error, request_id=None).model_dump()}
    return {"custom_id": result["custom_id"] or "", "result": shown}


def _count_requests(batch: BatchDocument, num_unfinished: int) -> MessageCounts:
    counts, status = batch["request_counts"], batch["status"]
    if status not in ENDED:
        return MessageCounts(processing=counts["total"])
    return MessageCounts(
        processing=0,
        succeeded=counts["completed"],
        errored=counts["failed"] - num_unfinished,
        canceled=num_unfinished if status == "cancelled" else 0,
        expired=num_unfinished if status == "expired" else 0,
    )


def _format_time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
