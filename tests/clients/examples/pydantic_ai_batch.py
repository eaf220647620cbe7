"""Batches of pydantic-ai, by OpenAI's files and by Anthropic's Message Batches: requests, and runs of an agent."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from typing import Any

from pydantic_ai import Agent, ModelRequest
from pydantic_ai.capabilities import BatchModelRequests
from pydantic_ai.direct import model_request_batch
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.batch import BatchRequest
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

BASE, MODEL, _ = sys.argv[1:]
QUICK = timedelta(seconds=0.5)
QUESTION = "What is the capital of France?"


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return "sunny" if city == "Paris" else "unknown"


async def run(model: Any) -> dict[str, Any]:
    wrong: Any = {"extra_body": {"strategy": {"name": "x"}}}
    requests = [
        BatchRequest(custom_id="right", messages=[ModelRequest.user_text_prompt(QUESTION)]),
        BatchRequest(custom_id="wrong", messages=[ModelRequest.user_text_prompt(QUESTION)], model_settings=wrong),
    ]
    right, refused = await model_request_batch(model, requests, poll_interval=QUICK)
    batching = BatchModelRequests(max_requests=2, max_wait=QUICK, poll_interval=QUICK)
    agent = Agent(model, tools=[get_weather], capabilities=[batching])
    async with batching:
        runs = await asyncio.gather(agent.run(QUESTION), agent.run("How is the weather in Paris?"))
    return {
        "plain": getattr(right, "text", repr(right)),
        "error": [type(refused).__name__, "unknown strategy 'x'" in str(refused)],
        "runs": [each.output for each in runs],
    }


async def main() -> dict[str, Any]:
    profile = OpenAIModelProfile(openai_supports_batch_api=True)
    openai = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"), profile=profile)
    messages = BASE.removesuffix("/v1")
    anthropic = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=messages, api_key="none"))
    return {"responses": await run(openai), "messages": await run(anthropic)}


print(json.dumps(asyncio.run(main())))
