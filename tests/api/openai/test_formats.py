"""Formats of answers through OpenAI's own client, on the real engine with the bundled policy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from tests.api.openai_client import MODEL, QUESTION, job_of, talking
from workers.config.settings import Settings
from workers.store.jobs import JobStore

POLICY = Path(__file__).parents[3] / "reasoner" / "bundled" / "policy"
SEARCH: dict[str, Any] = {"strategy": {"name": "self_consistency", "n": 4}, "budget": {"tokens": 2000}}


class Step(BaseModel):
    operation: Literal["add", "multiply"]
    operands: list[int] = Field(min_length=1, max_length=3)


class Sum(BaseModel):
    steps: list[Step] = Field(max_length=2)
    total: int = Field(ge=0, le=9999)
    is_even: bool | None


@pytest.fixture
async def ai(settings: Settings, url: str, store: JobStore) -> AsyncIterator[AsyncOpenAI]:
    engine = LocalEngine({MODEL: POLICY}, EngineOptions(kv_tokens=8192))
    async with talking(settings, url, store, engine) as client:
        yield client
    await engine.close()


async def test_an_answer_is_parsed_into_a_pydantic_model(ai: AsyncOpenAI) -> None:
    answer = await ai.chat.completions.parse(
        model=MODEL, messages=QUESTION, seed=5, response_format=Sum, extra_body=SEARCH
    )
    assert isinstance(answer.choices[0].message.parsed, Sum)
    assert answer.model_extra is not None
    votes = answer.model_extra["reasoner"]["votes"]
    assert all(Sum.model_validate_json(vote["answer"]) for vote in votes)


async def test_a_response_is_parsed_into_a_pydantic_model(ai: AsyncOpenAI) -> None:
    answer = await ai.responses.parse(model=MODEL, input="1 + 1?", text_format=Sum, extra_body=SEARCH)
    assert isinstance(answer.output_parsed, Sum)
    echoed: Any = answer.text
    assert (echoed.format.type, echoed.format.name) == ("json_schema", "Sum")
    again = await ai.responses.retrieve(answer.id)
    assert again.text == answer.text


async def test_a_stream_ends_with_the_same_json(ai: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    question: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 5, "response_format": form}
    whole = await ai.chat.completions.create(**question, extra_body=SEARCH)
    stream = await ai.chat.completions.create(**question, extra_body=SEARCH, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    jsonschema.validate(json.loads(text), schema)


async def test_json_mode_gives_an_object_or_no_answer(ai: AsyncOpenAI) -> None:
    answer = await ai.chat.completions.create(
        model=MODEL, messages=QUESTION, seed=5, response_format={"type": "json_object"}, extra_body=SEARCH
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


async def test_the_format_becomes_the_constraint_of_the_job(ai: AsyncOpenAI) -> None:
    answer = await ai.responses.create(
        model=MODEL, input="1 + 1?", background=True, text={"format": {"type": "json_object"}}, extra_body=SEARCH
    )
    address = str(ai.base_url).removesuffix("v1/")
    async with httpx.AsyncClient(base_url=address) as http:
        spec = (await http.get(f"/v1/jobs/{job_of(answer.id)}")).json()["spec"]
    assert spec["constraint"]["json_object"] is True
    assert (spec["answer"]["compare"], spec["answer"]["extract"]) == ("json", "all")
    plain = await ai.responses.create(
        model=MODEL, input="1 + 1?", background=True, text={"format": {"type": "text"}}, extra_body=SEARCH
    )
    async with httpx.AsyncClient(base_url=address) as http:
        assert (await http.get(f"/v1/jobs/{job_of(plain.id)}")).json()["spec"]["constraint"] is None


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {"format": "idn-email"}}},
            "json_schema.schema.properties.a: .*idn-email",
        ),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "no finite JSON is valid"),
    ],
)
async def test_a_schema_that_cannot_be_enforced_is_refused(
    ai: AsyncOpenAI, schema: dict[str, object], message: str
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(BadRequestError, match=message):
        await ai.chat.completions.create(model=MODEL, messages=QUESTION, response_format=form)
