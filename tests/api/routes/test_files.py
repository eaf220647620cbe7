"""``/v1/files`` with OpenAI's own client: upload, list, read, delete, expiry, limits, and invalid uploads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import redis
from openai import AsyncOpenAI
from openai.types import FileDeleted, FileObject

from api.http.multipart import OVERHEAD_BYTES
from tests.api.conftest import serving
from tests.api.openai_client import address, ai
from tests.scripted import ScriptedEngine
from workers.broker.reaper import Reaper
from workers.broker.wakeups import make_celery, make_templates
from workers.config.settings import Settings
from workers.store.files import LEFTOVER_SECONDS, FileStore
from workers.store.jobs import JobStore

__all__ = ["address", "ai"]

CONTENT = b'{"custom_id": "1"}\n\r\n--not-a-boundary\r\n\x00\xff'


async def test_a_file_comes_back_as_it_was_sent_and_is_openais_object(ai: AsyncOpenAI, settings: Settings) -> None:
    made = await ai.files.create(file=("lines.jsonl", CONTENT), purpose="batch")
    FileObject.model_validate(made.model_dump())
    assert (made.bytes, made.filename, made.purpose, made.object) == (len(CONTENT), "lines.jsonl", "batch", "file")
    assert made.expires_at == pytest.approx(made.created_at + settings.retention_seconds, abs=1)
    assert (await ai.files.content(made.id)).content == CONTENT
    assert await ai.files.retrieve(made.id) == made
    assert list(settings.files_folder.iterdir()) == [settings.files_folder / made.id]
    deleted = await ai.files.delete(made.id)
    assert deleted == FileDeleted(id=made.id, object="file", deleted=True)
    assert list(settings.files_folder.iterdir()) == []
    for call in (ai.files.retrieve, ai.files.content, ai.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await call(made.id)


async def test_lists_have_an_order_a_purpose_and_pages(ai: AsyncOpenAI) -> None:
    batches = [(await ai.files.create(file=(f"{n}", b"x"), purpose="batch")).id for n in range(3)]
    other = (await ai.files.create(file=("u", b"x"), purpose="user_data")).id
    assert [file.id async for file in ai.files.list()] == [other, *batches[::-1]]
    assert [file.id async for file in ai.files.list(order="asc", limit=2)] == [*batches, other]
    assert [file.id async for file in ai.files.list(purpose="batch", limit=1)] == batches[::-1]
    assert [file.id async for file in ai.files.list(purpose="user_data")] == [other]
    page = await ai.files.list(limit=2, after=batches[2])
    assert ([file.id for file in page.data], page.has_more) == (batches[1::-1], False)
    with pytest.raises(openai.BadRequestError, match="there is no file 'file-x'"):
        await ai.files.list(after="file-x")


async def test_a_file_is_deleted_when_its_time_is_over(
    ai: AsyncOpenAI, settings: Settings, store: JobStore, url: str
) -> None:
    made = await ai.files.create(
        file=("a", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    kept = await ai.files.create(file=("b", b"x"), purpose="user_data")
    assert (made.expires_at, kept.expires_at) == (made.created_at + 3600, None)
    files = FileStore(store, settings.files_folder)
    assert await files.expire() == 0
    with redis.Redis.from_url(url) as client:
        client.zadd("reasoner:files:expire", {made.id: 1}, xx=True)
    await Reaper(store, files, make_templates(make_celery(settings)), max_attempts=3, retention=60).sweep()
    assert [file.id async for file in ai.files.list()] == [kept.id]
    assert [path.name for path in settings.files_folder.iterdir()] == [kept.id]


async def test_bytes_of_a_killed_upload_are_removed_after_a_day(store: JobStore, tmp_path: Path) -> None:
    files = FileStore(store, tmp_path)
    for name, age in (("file-old", LEFTOVER_SECONDS + 60), ("file-new", 0), ("notes.txt", LEFTOVER_SECONDS + 60)):
        path = tmp_path / name
        path.write_bytes(b"x")
        changed = path.stat().st_mtime - age
        os.utime(path, (changed, changed))
    await files.remove_leftovers()
    assert sorted(os.listdir(tmp_path)) == ["file-new", "notes.txt"]


async def test_an_upload_may_be_larger_than_other_bodies_but_not_than_the_cap_or_the_owners_room(
    settings: Settings,
) -> None:
    limits = settings.limits.model_copy(update={"file_bytes": 250_000})
    changes = {"file_cap": 100_000, "body_cap": 2000, "limits": limits}
    async with serving(settings.model_copy(update=changes), ScriptedEngine()) as client:

        async def upload(size: int) -> httpx.Response:
            files = {"purpose": (None, "batch"), "file": ("f", b"x" * size)}
            return await client.post("/v1/files", files=files)

        assert (await upload(100_000)).status_code == 200
        for size in (100_001, 100_000 + OVERHEAD_BYTES):
            refused = await upload(size)
            assert (refused.status_code, "the limit of" in refused.json()["error"]["message"]) == (413, True)
        assert (await client.post("/v1/jobs", content=b"x" * 2001)).status_code == 413
        assert (await upload(100_000)).status_code == 200
        full = await upload(60_000)
        assert (full.status_code, full.json()["error"]["code"]) == (413, "storage_full")
        assert "your files have 200000 bytes, and the limit is 250000" in full.json()["error"]["message"]
        assert len(list(settings.files_folder.iterdir())) == 2


def form(*parts: tuple[str, bytes]) -> Iterator[bytes]:
    for disposition, value in parts:
        yield b"--b\r\nContent-Disposition: form-data; " + disposition.encode() + b"\r\n\r\n" + value + b"\r\n"
    yield b"--b--\r\n"


FILE = ('name="file"; filename="f"', b"x")
PURPOSE = ('name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        (b"".join(form(FILE)), "purpose", "it is missing: give 'batch'"),
        (b"".join(form(FILE, ('name="purpose"', b"fine-tune"))), "purpose", "'fine-tune' is not supported"),
        (b"".join(form(PURPOSE)), "file", "there is no part 'file'"),
        (b"".join(form(PURPOSE, ('name="file"', b"x"))), "file", "send it as a file"),
        (b"".join(form(PURPOSE, FILE, FILE)), "file", "comes twice"),
        (b"".join(form(PURPOSE, ('name="model"', b"x"), FILE)), "model", "known fields: file, purpose"),
        (b"".join(form(PURPOSE, ('name="purpose"', b"batch"), FILE)), "file", "comes twice"),
        (b"".join(form(("nothing", b"x"))), "file", "has no name"),
        (b"".join(form(PURPOSE, FILE))[:-6], "file", "breaks off"),
        (b"nothing of this kind", "file", "not multipart"),
        (
            b"".join(form(PURPOSE, FILE, ('name="expires_after[seconds]"', b"9"))),
            "expires_after.anchor",
            "'created_at'",
        ),
        (
            b"".join(
                form(
                    PURPOSE,
                    FILE,
                    ('name="expires_after[anchor]"', b"created_at"),
                    ('name="expires_after[seconds]"', b"9"),
                )
            ),
            "expires_after.seconds",
            "from 3600 to",
        ),
        (b"".join(form(PURPOSE, FILE, ('name="expires_after[anchor]"', b"x" * 5000))), "file", "more than 4096"),
    ],
)
async def test_an_invalid_upload_is_refused_with_what_would_be_right_and_leaves_nothing(
    client: httpx.AsyncClient, settings: Settings, body: bytes, param: str, hint: str
) -> None:
    response = await client.post("/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert hint in error["message"]
    assert list(settings.files_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ("filename*=utf-8''na%C3%AFve.jsonl", "naïve.jsonl"),
        ("filename*=iso-8859-1'en'na%EFve.jsonl", "naïve.jsonl"),
        ('filename="plain.jsonl"; filename*=utf-8other.jsonl', "plain.jsonl"),  # by RFC 7578
        ('filename=""', ""),
    ],
)
async def test_the_name_of_a_file_may_be_encoded(client: httpx.AsyncClient, disposition: str, name: str) -> None:
    body = b"".join(form(PURPOSE, (f'name="file"; {disposition}', b"x")))
    response = await client.post("/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert (response.status_code, response.json()["filename"]) == (200, name)


async def test_a_file_whose_record_is_in_doubt_keeps_its_bytes(
    client: httpx.AsyncClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has recorded it, and its answer was lost."""
    run = JobStore.script

    async def losing(self: JobStore, script: str, *arguments: str | int) -> object:
        answer = await run(self, script, *arguments)
        if script == "file_record":
            raise redis.ConnectionError("Connection closed by server.")
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(JobStore, "script", losing)
        files = {"purpose": (None, "batch"), "file": ("f", CONTENT)}
        assert (await client.post("/v1/files", files=files)).status_code == 503
    [listed] = (await client.get("/v1/files")).json()["data"]
    assert (await client.get(f"/v1/files/{listed['id']}/content")).content == CONTENT
    assert (await client.delete(f"/v1/files/{listed['id']}")).status_code == 200
    assert list(settings.files_folder.iterdir()) == []


async def test_uploads_at_the_same_time_have_room_for_all_of_their_bytes(settings: Settings) -> None:
    """Also those whose length is not known; one that breaks off, or is refused, leaves its room to the next."""
    limits = settings.limits.model_copy(update={"file_bytes": 250_000})
    changes = {"file_cap": 200_000, "limits": limits}
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    has_begun, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        whole = b"".join(form(PURPOSE, ('name="file"; filename="f"', b"x" * 1000)))
        yield whole[:500]
        has_begun.set()
        await may_go_on.wait()
        yield whole[500:]

    async with serving(settings.model_copy(update=changes), ScriptedEngine()) as client:

        async def upload(size: int) -> httpx.Response:
            return await client.post("/v1/files", files={"purpose": (None, "batch"), "file": ("f", b"x" * size)})

        arriving = asyncio.create_task(client.post("/v1/files", content=slow(), headers=headers))
        await has_begun.wait()
        refused = await upload(150_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "storage_full")
        may_go_on.set()
        assert (await arriving).status_code == 200
        assert (await upload(150_000)).status_code == 200
        bad = b"".join(form(('name="file"; filename="f"', b"x" * 90_000)))
        assert (await client.post("/v1/files", content=bad, headers=headers)).status_code == 400
        assert (await upload(90_000)).status_code == 200


async def test_a_body_that_is_no_form_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/files", json={"purpose": "batch"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
    assert "send multipart/form-data" in response.json()["error"]["message"]


async def test_a_file_whose_bytes_are_on_another_machine_is_an_error_that_says_so(
    ai: AsyncOpenAI, settings: Settings
) -> None:
    made = await ai.files.create(file=("lines.jsonl", CONTENT), purpose="batch")
    (settings.files_folder / made.id).unlink()
    with pytest.raises(openai.InternalServerError, match="must share one files_dir"):
        await ai.files.content(made.id)
