"""Inspect: an evaluation with a second turn, a tool and a structure, by both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools, user_message
from inspect_ai.tool import Tool, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

BASE, MODEL = sys.argv[1:]


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """Tell the weather of a city.

        Args:
            city: Name of the city.
        """
        return "sunny" if city == "Paris" else "unknown"

    return execute


def evaluate(model: Any, question: str, target: str, solvers: list[Any]) -> tuple[float, str]:
    task = Task(dataset=[Sample(input=question, target=target)], solver=solvers, scorer=includes())
    [log] = eval(task, model=model, display="none", log_dir="logs", log_samples=True)
    if log.status != "success" or log.results is None or not log.samples:
        raise SystemExit(f"{log.status}: {log.error}")
    return log.results.scores[0].metrics["accuracy"].value, log.samples[0].output.completion


def run(**settings: Any) -> dict[str, Any]:
    model = get_model(f"openai/{MODEL}", base_url=BASE, api_key="none", memoize=False, **settings)
    found: dict[str, Any] = {}
    found["plain"] = evaluate(model, "What is the capital of France?", "Paris", [generate()])
    found["second"] = evaluate(
        model, "What is the capital of France?", "Paris", [generate(), user_message("And what did I ask?"), generate()]
    )
    found["tool"] = evaluate(model, "How is the weather in Paris?", "sunny", [use_tools(get_weather()), generate()])
    schema = ResponseSchema(name="person", json_schema=json_schema(Person))

    async def ask() -> str:
        config = GenerateConfig(response_schema=schema, max_retries=0)
        return (await model.generate([ChatMessageUser(content="Who?")], config=config)).completion

    found["parsed"] = Person.model_validate_json(asyncio.run(ask())).model_dump()
    nobody = get_model("openai/nobody", base_url=BASE, api_key="none", memoize=False, **settings)
    [log] = eval(
        Task(dataset=[Sample(input="Who?")], solver=[generate()]),
        model=nobody,
        display="none",
        log_dir="logs",
        max_retries=0,
    )
    found["error"] = log.status == "error" and "nobody" in str(log.error and log.error.message)
    return found


print(json.dumps({"chat": run(responses_api=False), "responses": run(responses_api=True)}))
