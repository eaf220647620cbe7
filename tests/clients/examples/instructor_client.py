"""Instructor: answers as pydantic models, by functions and by JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel

BASE, MODEL, REAL_MODEL = sys.argv[1:]
plain = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0, timeout=120)

SUM: Any = {"role": "user", "content": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."}


class Person(BaseModel):
    name: str
    age: int


def run(mode: instructor.Mode) -> dict[str, Any]:
    client = instructor.from_openai(plain, mode=mode)
    found: dict[str, Any] = {}
    question: Any = {"role": "user", "content": "Who wrote the first program?"}
    person, answer = client.chat.completions.create_with_completion(
        model=MODEL, messages=[question], response_model=Person, max_retries=0
    )
    found["plain"] = person.model_dump()
    parts = client.chat.completions.create_partial(
        model=MODEL, messages=[question], response_model=Person, max_retries=0
    )
    found["stream"] = [part.model_dump() for part in parts][-1]
    message = answer.choices[0].message.model_dump()
    history: Any = [question, message]
    history += [{"role": "tool", "tool_call_id": each["id"], "content": "ok"} for each in message["tool_calls"] or ()]
    history += [{"role": "user", "content": "And the second one?"}]
    second = client.chat.completions.create(model=MODEL, messages=history, response_model=Person, max_retries=0)
    found["second"] = second.model_dump()
    try:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "cut"}], response_model=Person, max_retries=0
        )
    except Exception as error:
        found["cut"] = type(error).__name__
    try:
        client.chat.completions.create(model="nobody", messages=[question], response_model=Person, max_retries=0)
    except Exception as error:
        found["error"] = type(error).__name__
    real = plain.chat.completions.create(model=REAL_MODEL, messages=[*history[:-1], SUM], max_tokens=400)
    found["real"] = bool(real.choices[0].message.content)
    return found


print(json.dumps({"tools": run(instructor.Mode.TOOLS), "json": run(instructor.Mode.JSON_SCHEMA)}))
