"""Routes of ``/v1/messages/batches``: the requests become the lines of a file, whose batch is that of the messages."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Path, Query, Request
from fastapi.responses import StreamingResponse

from api.anthropic.errors import PREFIX, AnthropicErrorDocument
from api.batches.message_batch import (
    BATCHES,
    KIND,
    BatchRequest,
    MessageBatch,
    MessageBatches,
    NewMessageBatch,
    build_result,
    find_own_id,
)
from api.http.principal import AnyPrincipal, Principal, Reader, Writer
from api.http.problems import Problem
from api.http.request_parsing import IdempotencyKey, JsonRoute, check_query_parameters, read_idempotency
from api.http.state import ServiceState, State
from api.http.submission import submit_file_batch
from reasoner.jobs.batch import ENDED, FileBatchSpec
from workers.store.batches import BatchDocument, BatchStore, NoSuchBatch
from workers.store.file_batches import FileBatchStore
from workers.store.files import StoredFile

WINDOW = "24h"
"""The time after which requests that have not ended are ``expired``, as at Anthropic."""
_BATCH_ID = re.compile(f"{KIND}[0-9a-f]{{32}}")
_SCAN = 100
"""Batches that are looked at together for a page."""


async def accept_beta(
    beta: Annotated[Literal["true"] | None, Query(description="Sent by beta classes of clients; ignored.")] = None,
) -> None:
    """Accept the query parameter with which the beta classes of Anthropic's clients call the same paths."""


router = APIRouter(
    prefix=BATCHES,
    route_class=JsonRoute,
    tags=["anthropic"],
    responses={"default": {"model": AnthropicErrorDocument}},
    dependencies=[Depends(check_query_parameters), Depends(accept_beta)],
)

QUESTION = {"model": "policy", "max_tokens": 400, "messages": [{"role": "user", "content": "Reach 10 from 9, 5, 6."}]}
EXAMPLES: dict[str, Any] = {
    "plain": {
        "summary": "Two messages",
        "value": {"requests": [{"custom_id": name, "params": QUESTION} for name in ("first", "second")]},
    }
}


async def check_batch_id(
    message_batch_id: Annotated[str, Path(description="The 'id' in the answer of POST /v1/messages/batches.")],
    state: State,
    principal: AnyPrincipal,
) -> str:
    """Return the own id of a batch of messages that the principal may see."""
    batches, own_id = BatchStore(state.store), find_own_id(message_batch_id)
    if not _BATCH_ID.fullmatch(message_batch_id):
        raise NoSuchBatch(message_batch_id)
    await batches.check_owner(own_id, principal.visible_owner)
    if (await batches.get(own_id))["endpoint"] != PREFIX:
        raise NoSuchBatch(message_batch_id)
    return own_id


BatchId = Annotated[str, Depends(check_batch_id)]


@router.post("", summary="Create a batch of messages")
async def create_batch(
    body: Annotated[NewMessageBatch, Body(openapi_examples=EXAMPLES)],
    request: Request,
    state: State,
    principal: Writer,
    idempotency_key: IdempotencyKey = None,
) -> MessageBatch:
    """The requests are the lines of a batch as of ``POST /v1/batches``, whose id is ``batch_`` and the digits of this
    one's. One that cannot run is ``errored`` in the results, and the others run. The body is at most as long as any
    other: give more requests as a file.
    """
    idempotency = await read_idempotency(idempotency_key, request)
    file_id = await _store_lines(body.requests, principal, state)
    spec = FileBatchSpec(input_file_id=file_id, endpoint=PREFIX, completion_window=WINDOW)
    is_new = False
    try:
        batch, is_new = await submit_file_batch(spec, principal, state, idempotency=idempotency)
    finally:
        if not is_new:
            await state.files.delete(file_id)
    return await _show_batch(batch, state)


@router.get("", summary="List batches of messages, newest first")
async def list_batches(
    state: State,
    principal: Reader,
    after_id: Annotated[str | None, Query(description="The 'last_id' of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> MessageBatches:
    after, found, more = None if after_id is None else find_own_id(after_id), list[BatchDocument](), True
    while more and len(found) <= limit:
        try:
            batches = await BatchStore(state.store).list_batches(
                owner=principal.visible_owner, after=after, limit=_SCAN
            )
        except NoSuchBatch:
            message = f"there is no batch {after_id!r}: give the 'last_id' of the page before"
            raise Problem(400, "unknown-cursor", f"after_id: {message}", errors=[("after_id", message)]) from None
        found += [batch for batch in batches if batch["endpoint"] == PREFIX]
        after, more = batches[-1]["id"] if batches else None, len(batches) == _SCAN
    data = [await _show_batch(batch, state) for batch in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return MessageBatches(data=data, has_more=len(found) > limit, first_id=first, last_id=last)


@router.get("/{message_batch_id}", summary="Look at a batch of messages")
async def show(_: Reader, batch_id: BatchId, state: State) -> MessageBatch:
    return await _show_batch(await BatchStore(state.store).get(batch_id), state)


@router.post("/{message_batch_id}/cancel", summary="Cancel a batch of messages")
async def cancel(_: Writer, batch_id: BatchId, state: State) -> MessageBatch:
    """The results have the messages that were created until then."""
    return await _show_batch(await BatchStore(state.store).cancel(batch_id), state)


@router.get(
    "/{message_batch_id}/results",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-jsonl": {"schema": {"type": "string"}}}}},
    summary="Read the results of a batch of messages that has ended",
)
async def read_results(_: Reader, batch_id: BatchId, state: State) -> StreamingResponse:
    """A line for each request, with its ``custom_id`` and ``result``: ``succeeded`` with the message, ``errored`` with
    the error, ``canceled`` or ``expired``. Those that succeeded come first; each kind is in the order of the requests.
    """
    batch = await BatchStore(state.store).get(batch_id)
    if batch["status"] not in ENDED:
        raise Problem(409, "batch-active", "the batch has not ended: wait until its processing_status is 'ended'")
    if batch["errors"] is not None:
        raise Problem(500, "batch-failed", batch["errors"]["data"][0]["message"])
    ids = [batch[field] for field in ("output_file_id", "error_file_id") if batch[field] is not None]
    paths = [state.files.get_path(file_id) for file_id in ids]
    if not await asyncio.to_thread(lambda: all(path.is_file() for path in paths)):
        raise Problem(404, "results-gone", "the results of this batch are not kept any more")
    return StreamingResponse(_iterate_results(paths), media_type="application/x-jsonl")


async def _store_lines(requests: Sequence[BatchRequest], principal: Principal, state: ServiceState) -> str:
    """Store requests as the lines of a file. Return its id."""
    file_id, limits = f"file-{secrets.token_hex(16)}", state.settings.limits.for_owner(principal.owner)
    is_stored = False
    try:
        num_bytes = await asyncio.to_thread(_write_lines, requests, state.files.get_path(file_id))
        is_stored = True
    finally:
        if not is_stored:
            await state.files.remove_bytes(file_id)
    file = StoredFile(
        id=file_id,
        owner=principal.owner,
        filename="requests.jsonl",
        purpose="batch",
        num_bytes=num_bytes,
        keep_seconds=state.settings.retention_seconds,
    )
    await state.files.record(file, limits.file_bytes)
    return file_id


def _write_lines(requests: Sequence[BatchRequest], path: FilePath) -> int:
    """Write a line for each request. Return the bytes of all."""
    with path.open("wb") as file:
        for request in requests:
            line = {"custom_id": request.custom_id, "method": "POST", "url": PREFIX, "body": request.params}
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        return file.tell()


def _iterate_results(paths: Sequence[FilePath]) -> Iterator[str]:
    for path in paths:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                # ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
                yield json.dumps(build_result(json.loads(line))) + "\n"


async def _show_batch(batch: BatchDocument, state: ServiceState) -> MessageBatch:
    is_closed = batch["status"] in ("cancelled", "expired")
    num_unfinished = await FileBatchStore(state.store).count_unfinished(batch["id"]) if is_closed else 0
    return MessageBatch.from_batch(batch, num_unfinished)
