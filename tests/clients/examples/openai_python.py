"""OpenAI's client for Python: Chat Completions and Responses."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from pydantic import BaseModel

BASE, MODEL, REAL_MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=120)
QUESTION: Any = {"role": "user", "content": "What is the capital of France?"}
SUM: Any = {"role": "user", "content": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."}
ENDLESS: Any = {"role": "user", "content": "Tell an endless story."}
WEATHER: Any = {"role": "user", "content": "How is the weather in Paris?"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
FLAT_TOOL: Any = {"type": "function", **TOOL["function"]}


class Person(BaseModel):
    name: str
    age: int


def run_chat() -> dict[str, Any]:
    found: dict[str, Any] = {}
    first = client.chat.completions.create(model=MODEL, messages=[QUESTION], store=True, user="u", n=1)
    found["plain"] = first.choices[0].message.content
    chunks = client.chat.completions.create(
        model=MODEL, messages=[QUESTION], stream=True, stream_options={"include_usage": True}
    )
    found["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    history: Any = [QUESTION, first.choices[0].message, {"role": "user", "content": "And what did I ask?"}]
    found["second"] = client.chat.completions.create(model=MODEL, messages=history).choices[0].message.content
    call = client.chat.completions.create(model=MODEL, messages=[WEATHER], tools=[TOOL]).choices[0]
    found["call"] = [json.loads(each.function.arguments) for each in call.message.tool_calls or ()]  # type: ignore[union-attr]
    history = [WEATHER, call.message]
    history += [{"role": "tool", "tool_call_id": each.id, "content": "sunny"} for each in call.message.tool_calls or ()]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL]).choices[0]
    found["tool"] = answer.message.content
    history[-1]["content"] = ""
    found["empty_result"] = client.chat.completions.create(model=MODEL, messages=history).choices[0].message.content
    parsed = client.chat.completions.parse(model=MODEL, messages=[QUESTION], response_format=Person)
    found["parsed"] = parsed.choices[0].message.parsed and parsed.choices[0].message.parsed.model_dump()
    found["cut"] = cut_error(
        lambda: client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "cut"}], response_format=Person
        )
    )
    found["error"] = cut_error(lambda: client.chat.completions.create(model="nobody", messages=[QUESTION]))
    with client.chat.completions.create(model=MODEL, messages=[ENDLESS], stream=True) as chunks:
        next(iter(chunks))  # leaving the block ends the request, and the job behind it
    real: Any = {"model": REAL_MODEL, "max_tokens": 400}
    first = client.chat.completions.create(messages=[SUM], **real)
    assert first.choices[0].message.content
    more = [SUM, first.choices[0].message, WEATHER, call.message, history[-1], SUM]
    found["real"] = bool(client.chat.completions.create(messages=more, **real).choices[0].message.content)
    return found


def cut_error(ask: Any) -> str:
    try:
        ask()
    except Exception as error:
        return type(error).__name__
    return "none"


def run_responses() -> dict[str, Any]:
    found: dict[str, Any] = {}
    first = client.responses.create(model=MODEL, input="What is the capital of France?", store=False, truncation="auto")
    found["plain"] = first.output_text
    with client.responses.stream(model=MODEL, input="What is the capital of France?") as stream:
        for _ in stream:
            pass
        found["stream"] = stream.get_final_response().output_text
    history: Any = [QUESTION, *first.output, {"role": "user", "content": "And what did I ask?"}]
    found["second"] = client.responses.create(
        model=MODEL, input=history, include=["reasoning.encrypted_content"], prompt_cache_key="k", service_tier="auto"
    ).output_text
    call = client.responses.create(model=MODEL, input=[WEATHER], tools=[FLAT_TOOL])
    calls: Any = [item for item in call.output if item.type == "function_call"]
    found["call"] = [json.loads(each.arguments) for each in calls]
    results: Any = [
        {"type": "function_call_output", "call_id": each.call_id, "output": [{"type": "input_text", "text": "sunny"}]}
        for each in calls
    ]
    found["tool"] = client.responses.create(
        model=MODEL, input=[WEATHER, *call.output, *results], tools=[FLAT_TOOL]
    ).output_text
    references: Any = [{"type": "item_reference", "id": item.id} for item in call.output]
    found["referenced"] = client.responses.create(model=MODEL, input=[WEATHER, *references, *results]).output_text
    found["empty_result"] = client.responses.create(
        model=MODEL, input=[WEATHER, *references, results[0] | {"output": ""}]
    ).output_text
    parsed = client.responses.parse(model=MODEL, input="Who?", text_format=Person)
    found["parsed"] = parsed.output_parsed and parsed.output_parsed.model_dump()
    cut = client.responses.create(model=MODEL, input="cut")
    found["cut"] = [cut.status, cut.incomplete_details and cut.incomplete_details.reason]
    found["error"] = cut_error(lambda: client.responses.create(model="nobody", input="Who?"))
    with client.responses.create(model=MODEL, input=[ENDLESS], stream=True) as events:
        next(iter(events))
    real: Any = {"model": REAL_MODEL, "max_output_tokens": 400}
    first = client.responses.create(input=[SUM], **real)
    more: Any = [SUM, *first.output, WEATHER, *call.output, *results, SUM]
    found["real"] = bool(client.responses.create(input=more, **real).output_text)
    return found


print(json.dumps({"chat": run_chat(), "responses": run_responses()}))
