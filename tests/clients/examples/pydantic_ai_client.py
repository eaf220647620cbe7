"""Agents of pydantic-ai, by both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE, MODEL, REAL_MODEL = sys.argv[1:]

SUM = "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return "sunny" if city == "Paris" else "unknown"


async def run(make: Any) -> dict[str, Any]:
    model = make(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
    real = make(REAL_MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
    found: dict[str, Any] = {}
    agent = Agent(model, instructions="Be short.", tools=[get_weather])
    first = await agent.run("What is the capital of France?")
    found["plain"] = first.output
    async with agent.run_stream("What is the capital of France?") as streamed:
        found["stream"] = [text async for text in streamed.stream_text()][-1]
    second = await agent.run("And what did I ask?", message_history=first.all_messages())
    found["second"] = second.output
    called = await agent.run("How is the weather in Paris?")
    parts = [part for message in called.all_messages() for part in message.parts if part.part_kind == "tool-call"]
    found["call"] = [part.args_as_dict() for part in parts]
    found["tool"] = called.output
    found["parsed"] = (await Agent(model, output_type=NativeOutput(Person)).run("Who?")).output.model_dump()
    found["parsed_by_function"] = (await Agent(model, output_type=Person).run("Who?")).output.model_dump()
    try:
        await Agent(make("nobody", provider=OpenAIProvider(base_url=BASE, api_key="none"))).run("Who?")
    except Exception as error:
        found["error"] = type(error).__name__
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):  # seconds, of the minute that the story takes: then its job is cancelled
            await agent.run("Tell an endless story.")
    settings: Any = {"max_tokens": 400}
    words = await Agent(real).run(SUM, model_settings=settings)
    history = [*words.all_messages(), *called.all_messages()]
    found["real"] = bool((await Agent(real).run(SUM, message_history=history, model_settings=settings)).output)
    return found


async def run_all() -> dict[str, Any]:
    return {"chat": await run(OpenAIChatModel), "responses": await run(OpenAIResponsesModel)}


print(json.dumps(asyncio.run(run_all())))
