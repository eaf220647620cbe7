"""Anthropic's client for Python: Messages."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
from pydantic import BaseModel

BASE, MODEL, REAL_MODEL = sys.argv[1:]
client = anthropic.Anthropic(base_url=BASE.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120)
QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}
SUM: Any = {"role": "user", "content": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."}
WEATHER: Any = {"role": "user", "content": "How is the weather in Paris?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "get_weather", "description": "Tell the weather of a city.", "input_schema": SCHEMA}


class Person(BaseModel):
    name: str
    age: int


def ask(messages: list[Any], model: str = MODEL, **more: Any) -> anthropic.types.Message:
    return client.messages.create(model=model, messages=messages, max_tokens=400, **more)


def join_texts(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    first = ask([QUESTION], system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}])
    found["plain"] = join_texts(first)
    with client.messages.stream(model=MODEL, messages=[QUESTION], max_tokens=400) as stream:
        found["stream"] = "".join(stream.text_stream)
    history = [QUESTION, {"role": "assistant", "content": first.content}]
    found["second"] = join_texts(ask([*history, {"role": "user", "content": "And what did I ask?"}]))
    called = ask([WEATHER], tools=[TOOL])
    calls = [block for block in called.content if block.type == "tool_use"]
    found["call"] = [block.input for block in calls]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"} for block in calls]
    weather: list[Any] = [
        WEATHER,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": results},
    ]
    found["tool"] = join_texts(ask(weather, tools=[TOOL]))
    config: Any = {"format": {"type": "json_schema", "schema": PERSON}}
    found["parsed"] = json.loads(join_texts(ask([QUESTION], output_config=config)))
    read = client.messages.parse(model=MODEL, messages=[QUESTION], max_tokens=400, output_format=Person)
    found["parsed_by_class"] = read.parsed_output and read.parsed_output.model_dump()
    found["cut"] = ask([{"role": "user", "content": "cut"}]).stop_reason
    try:
        ask([QUESTION], model="nobody")
    except anthropic.APIStatusError as error:
        found["error"] = type(error).__name__
    endless: Any = {"role": "user", "content": "Tell an endless story."}
    with client.messages.stream(model=MODEL, messages=[endless], max_tokens=4000) as stream:
        next(iter(stream))  # leaving the block ends the request, and the job behind it
    words = ask([SUM], model=REAL_MODEL)
    after: list[Any] = [SUM, {"role": "assistant", "content": words.content}, *weather, SUM]
    found["real"] = bool(join_texts(ask(after, model=REAL_MODEL)))
    return found


print(json.dumps(main()))
