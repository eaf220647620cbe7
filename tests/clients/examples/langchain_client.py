"""LangChain's models of OpenAI, by both of its APIs."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

BASE, MODEL, REAL_MODEL = sys.argv[1:]

SUM = "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return "sunny" if city == "Paris" else "unknown"


def run(**settings: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"base_url": BASE, "api_key": "none", "max_retries": 0, "timeout": 120} | settings
    model = ChatOpenAI(model=MODEL, **common)
    found: dict[str, Any] = {}
    question = HumanMessage("What is the capital of France?")
    first = model.invoke([question])
    found["plain"] = first.text
    found["stream"] = "".join(chunk.text for chunk in model.stream([question]))
    found["second"] = model.invoke([question, first, HumanMessage("And what did I ask?")]).text
    weather = HumanMessage("How is the weather in Paris?", name="ada")
    calling = model.bind_tools([get_weather])
    call = calling.invoke([weather])
    found["call"] = [each["args"] for each in call.tool_calls]
    results: list[ToolMessage] = [get_weather.invoke(each) for each in call.tool_calls]
    found["tool"] = calling.invoke([weather, call, *results]).text
    found["parsed"] = model.with_structured_output(Person).invoke([question]).model_dump()  # type: ignore[union-attr]
    by_function = model.with_structured_output(Person, method="function_calling")
    found["parsed_by_function"] = by_function.invoke([question]).model_dump()  # type: ignore[union-attr]
    try:
        ChatOpenAI(model="nobody", **common).invoke([question])
    except Exception as error:
        found["error"] = "nobody" in str(error)
    chunks = model.stream("Tell an endless story.")
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]  # a generator: it ends the request, and the job behind it
    real = ChatOpenAI(model=REAL_MODEL, max_tokens=400, **common)
    first = real.invoke(SUM)
    found["real"] = bool(real.invoke([HumanMessage(SUM), first, weather, call, *results, HumanMessage(SUM)]).text)
    try:
        real.invoke("word " * 5000)
    except ContextOverflowError:
        found["too_long"] = True
    return found


print(json.dumps({"chat": run(), "responses": run(use_responses_api=True, output_version="responses/v1")}))
