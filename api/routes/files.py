"""Routes of ``/v1/files``: upload, list, show, read and delete files, in OpenAI's format."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from api.http.multipart import OVERHEAD_BYTES, Upload, receive_upload
from api.http.pagination import After, Page, build_page, unknown_cursor
from api.http.principal import AnyPrincipal, Reader, Writer
from api.http.problems import Problem
from api.http.request_parsing import check_query_parameters
from api.http.state import State
from api.openai.errors import ErrorDocument
from workers.store.files import NoSuchFile, StoredFile

MIN_EXPIRY_SECONDS = 3600
MAX_EXPIRY_SECONDS = 30 * 86_400
MAX_FILENAME_CHARS = 255
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_PURPOSES = ("batch", "user_data")
_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")

router = APIRouter(
    prefix="/v1/files",
    tags=["files"],
    responses={"default": {"model": ErrorDocument}},
    dependencies=[Depends(check_query_parameters)],
)


class FileObject(BaseModel):
    """OpenAI's file object. Times are seconds since the epoch."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output", "user_data"]
    status: Literal["processed"]
    status_details: None = None


class FilePage(Page[FileObject]):
    object: Literal["list"] = "list"


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(_PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_SECONDS, "maximum": MAX_EXPIRY_SECONDS},
    },
}


async def check_file_id(
    file_id: Annotated[str, Path(description="The 'id' in the answer of POST /v1/files.")],
    state: State,
    principal: AnyPrincipal,
) -> str:
    """Return the id of a file that the principal may see, as ``api.routes.jobs.check_job_id`` does for jobs."""
    if not _FILE_ID.fullmatch(file_id):
        raise NoSuchFile(file_id)
    await state.files.check_owner(file_id, principal.visible_owner)
    return file_id


FileId = Annotated[str, Depends(check_file_id)]


@router.post(
    "",
    response_model=FileObject,
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
    summary="Upload a file",
)
async def upload(request: Request, state: State, principal: Writer) -> Response:
    """The body is ``multipart/form-data`` and is written to disk as it arrives. ``purpose`` is ``batch`` for the input
    of a batch, or ``user_data``. ``expires_after`` is as OpenAI's; without it, a file of a batch is kept as long as
    ended jobs are, and any other until it is deleted.
    """
    settings, owner, file_id = state.settings, principal.owner, f"file-{secrets.token_hex(16)}"
    cap, most = settings.limits.for_owner(owner).file_bytes, settings.file_cap
    length = request.headers.get("content-length")
    expected = None if length is None else min(most, max(0, int(length) - OVERHEAD_BYTES))
    async with state.files.reserve_room(owner, file_id, expected, most=most, cap=cap) as room:
        is_stored = False
        try:
            content_type, path = request.headers.get("content-type", ""), state.files.get_path(file_id)
            max_bytes = room if expected is None else most
            received = await receive_upload(request.stream(), content_type, path, max_bytes)
            file = _build_file(file_id, owner, received, default_seconds=settings.retention_seconds)
            is_stored = True
        except ClientDisconnect:
            return Response(status_code=499)
        finally:
            if not is_stored:
                await state.files.remove_bytes(file_id)
        return JSONResponse(await state.files.record(file, cap))


@router.get("", name="page", response_model=FilePage, summary="List files, newest first")
async def list_page(
    state: State,
    principal: Reader,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    purpose: Annotated[str | None, Query(description="Only files of this purpose.", max_length=64)] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="Oldest first, or newest first.")] = "desc",
) -> Response:
    try:
        files = await state.files.list_files(
            owner=principal.visible_owner, purpose=purpose, after=after, limit=limit + 1, order=order
        )
    except NoSuchFile:
        raise unknown_cursor("file", after) from None
    return JSONResponse({"object": "list"} | build_page(files, limit))


@router.get("/{file_id}", response_model=FileObject, summary="Look at a file")
async def show(_: Reader, file_id: FileId, state: State) -> Response:
    return JSONResponse(await state.files.get(file_id))


@router.get(
    "/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
    summary="Read a file",
)
async def read(_: Reader, file_id: FileId, state: State) -> Response:
    """The bytes of the file, as a stream; ``Range`` asks for a part of them."""
    file = await state.files.get(file_id)
    path = state.files.get_path(file_id)
    if not await asyncio.to_thread(path.is_file):
        raise Problem(
            500,
            "file-missing",
            "the bytes of this file are not in the folder of this process: all API processes must share one files_dir",
        )
    return FileResponse(path, media_type="application/octet-stream", filename=file["filename"] or file_id)


@router.delete("/{file_id}", response_model=DeletedFile, summary="Delete a file")
async def delete(_: Writer, file_id: FileId, state: State) -> DeletedFile:
    await state.files.delete(file_id)
    return DeletedFile(id=file_id)


def _build_file(file_id: str, owner: str, received: Upload, *, default_seconds: float) -> StoredFile:
    """Return the file of an upload. Raises ``Problem`` for a field that is unknown or invalid."""
    fields = received.fields
    for name in fields:
        if name not in _FIELDS:
            raise _invalid_field(name, f"unknown field; known fields: {', '.join(_FIELDS)}")
    purpose = fields.get("purpose")
    if purpose not in _PURPOSES:
        given = "it is missing" if purpose is None else f"{purpose!r} is not supported"
        raise _invalid_field("purpose", f"{given}: give 'batch' for the input of a batch, or 'user_data'")
    if len(received.filename) > MAX_FILENAME_CHARS:
        raise _invalid_field("file", f"the file's name has more than {MAX_FILENAME_CHARS} characters")
    default = default_seconds if purpose == "batch" else None
    return StoredFile(
        id=file_id,
        owner=owner,
        filename=received.filename,
        purpose=purpose,
        num_bytes=received.num_bytes,
        keep_seconds=_read_expiry(fields, default),
    )


def _read_expiry(fields: Mapping[str, str], default: float | None) -> float | None:
    """Return the seconds for which a file is kept."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default
    if anchor != "created_at":
        raise _invalid_field("expires_after.anchor", "it must be 'created_at'")
    number = int(seconds) if seconds is not None and re.fullmatch("[0-9]{1,9}", seconds) else 0
    if not MIN_EXPIRY_SECONDS <= number <= MAX_EXPIRY_SECONDS:
        bounds = f"give a number of seconds from {MIN_EXPIRY_SECONDS} to {MAX_EXPIRY_SECONDS}"
        raise _invalid_field("expires_after.seconds", bounds)
    return number


def _invalid_field(field: str, message: str) -> Problem:
    return Problem(422, "invalid-request", f"{field}: {message}", errors=[(field, message)])
