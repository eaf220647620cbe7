"""Answers whose rest a server withholds for its content, as OpenAI's client reads them."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest

from engine.protocol.refusal import Refusal
from engine.protocol.types import Completion, Events, GenerateRequest
from tests.api.openai_client import MODEL, QUESTION, talking
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings
from workers.store.jobs import JobStore

WORDS = "the server ended the answer with 'content_filter'"


class Filtering(ScriptedEngine):
    """Engine whose server withholds the rest of every answer behind its beginning, of some or no characters."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        async for event in super().generate(request, stream=stream):
            assert isinstance(event, Completion)
            refusal = Refusal(WORDS, kind="filtered")
            yield replace(event, text=self._beginning, finish_reason="refused", stop=None, refusal=refusal)


async def test_the_beginning_of_a_filtered_answer_is_the_answer(settings: Settings, url: str, store: JobStore) -> None:
    async with talking(settings, url, store, Filtering("It is")) as ai:
        whole = await ai.chat.completions.create(model=MODEL, messages=QUESTION)  # type: ignore[arg-type]
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("It is", "content_filter")
        response = await ai.responses.create(model=MODEL, input="1 + 1?")
        assert (response.output_text, response.status) == ("It is", "incomplete")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "content_filter"
    (job, _) = (await store.list_jobs(owner=None, after=None, limit=9)).jobs
    assert job["status"] == "incomplete"
    assert WORDS in job["result"]["note"]


async def test_an_answer_that_is_filtered_whole_is_an_error_with_the_servers_words(
    settings: Settings, url: str, store: JobStore
) -> None:
    async with talking(settings, url, store, Filtering("")) as ai:
        with pytest.raises(openai.BadRequestError, match="content_filter") as refusal:
            await ai.chat.completions.create(model=MODEL, messages=QUESTION)  # type: ignore[arg-type]
        assert refusal.value.code == "content_filter"
        response = await ai.responses.create(model=MODEL, input="1 + 1?")
        assert response.status == "failed"
        assert response.error is not None
        assert (response.error.code, response.error.message) == ("invalid_prompt", WORDS)
