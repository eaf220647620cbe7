"""LiteLLM, which other frameworks use to reach any OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel

BASE, MODEL, REAL_MODEL = sys.argv[1:]
litellm.telemetry = False
QUESTION = {"role": "user", "content": "What is the capital of France?"}
SUM = {"role": "user", "content": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."}
WEATHER = {
    "role": "user",
    "content": [{"type": "text", "text": "How is the weather?", "cache_control": {"type": "ephemeral"}}],
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class Person(BaseModel):
    name: str
    age: int


def ask(model: str = MODEL, **more: Any) -> Any:
    return litellm.completion(model=f"openai/{model}", api_base=BASE, api_key="none", timeout=120, **more)


found: dict[str, Any] = {}
first = ask(messages=[QUESTION])
found["plain"] = first.choices[0].message.content
found["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in ask(messages=[QUESTION], stream=True))
history = [QUESTION, first.choices[0].message.model_dump(), {"role": "user", "content": "And what did I ask?"}]
found["second"] = ask(messages=history).choices[0].message.content
call = ask(messages=[WEATHER], tools=[TOOL], parallel_tool_calls=True).choices[0].message
found["call"] = [json.loads(each.function.arguments) for each in call.tool_calls]
results = [
    {"role": "tool", "tool_call_id": each.id, "name": "get_weather", "content": "sunny"} for each in call.tool_calls
]
found["tool"] = ask(messages=[WEATHER, call, *results], tools=[TOOL]).choices[0].message.content
parsed = ask(messages=[QUESTION], response_format=Person).choices[0].message.content
found["parsed"] = Person.model_validate_json(parsed).model_dump()
found["cut"] = ask(messages=[{"role": "user", "content": "cut"}]).choices[0].finish_reason
try:
    ask(REAL_MODEL, messages=[{"role": "user", "content": "word " * 5000}])
except litellm.ContextWindowExceededError as error:
    found["too_long"] = type(error).__name__
try:
    ask("nobody", messages=[QUESTION])
except (litellm.NotFoundError, litellm.BadRequestError) as error:
    found["error"] = type(error).__name__
chunks = ask(messages=[{"role": "user", "content": "Tell an endless story."}], stream=True)
next(iter(chunks))
chunks.completion_stream.close()  # ends the request, and the job behind it
short = {"model": REAL_MODEL, "max_tokens": 400}
first = ask(messages=[SUM], **short).choices[0].message
more = [SUM, first.model_dump(), WEATHER, call, *results, SUM]
found["real"] = bool(ask(messages=more, **short).choices[0].message.content)
print(json.dumps(found))
