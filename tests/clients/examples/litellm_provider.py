"""LiteLLM with this service as a provider of its own: the models are `reasoner/NAME`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import litellm
from litellm import CustomLLM
from litellm.types.utils import GenericStreamingChunk

BASE, MODEL, _ = sys.argv[1:]
litellm.telemetry = False
QUESTION = {"role": "user", "content": "What is the capital of France?"}


class Reasoner(CustomLLM):
    """Sends what it gets to the service, with the fields that only it knows."""

    def completion(self, *, model: str, messages: list[Any], optional_params: dict[str, Any], **_: Any) -> Any:
        return litellm.completion(f"openai/{model}", messages, api_base=BASE, api_key="none", **optional_params)

    def streaming(
        self, *, model: str, messages: list[Any], optional_params: dict[str, Any], **_: Any
    ) -> Iterator[GenericStreamingChunk]:
        options = optional_params | {"stream": True}
        for chunk in litellm.completion(f"openai/{model}", messages, api_base=BASE, api_key="none", **options):
            choice = chunk.choices[0]
            yield GenericStreamingChunk(
                text=choice.delta.content or "",
                is_finished=choice.finish_reason is not None,
                finish_reason=choice.finish_reason or "",
                index=0,
                tool_use=None,
                usage=None,
            )


litellm.custom_provider_map = [{"provider": "reasoner", "custom_handler": Reasoner()}]


def ask(messages: list[Any], **more: Any) -> Any:
    return litellm.completion(f"reasoner/{MODEL}", messages, **more)


found: dict[str, Any] = {}
first = ask([QUESTION], extra_body={"strategy": {"name": "self_consistency", "n": 3}})
found["plain"] = first.choices[0].message.content
found["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in ask([QUESTION], stream=True))
history = [QUESTION, first.choices[0].message.model_dump(), {"role": "user", "content": "And what did I ask?"}]
found["second"] = ask(history).choices[0].message.content
try:
    litellm.completion("reasoner/nobody", [QUESTION])
except Exception as error:
    found["error"] = "nobody" in str(error)
print(json.dumps(found))
