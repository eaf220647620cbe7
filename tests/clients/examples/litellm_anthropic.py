"""LiteLLM by its Anthropic route: as ``anthropic/`` in its own format, and as Anthropic's Messages."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

BASE, MODEL, _ = sys.argv[1:]
litellm.telemetry = False
SERVER: Any = {"model": f"anthropic/{MODEL}", "api_base": BASE.removesuffix("/v1"), "api_key": "none"}
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def ask(messages: list[Any], **more: Any) -> Any:
    return litellm.completion(messages=messages, max_tokens=400, timeout=120, **SERVER, **more)


found: dict[str, Any] = {}
first = ask([QUESTION])
found["plain"] = first.choices[0].message.content
found["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in ask([QUESTION], stream=True))
history = [QUESTION, first.choices[0].message.model_dump(), {"role": "user", "content": "And what did I ask?"}]
found["second"] = ask(history).choices[0].message.content
try:
    litellm.completion(messages=[QUESTION], max_tokens=400, **(SERVER | {"model": "anthropic/nobody"}))
except Exception as error:
    found["error"] = type(error).__name__
message: Any = asyncio.run(litellm.anthropic.messages.acreate(messages=[QUESTION], max_tokens=400, **SERVER))
found["messages"] = "".join(block["text"] for block in message["content"] if block["type"] == "text")
print(json.dumps(found))
