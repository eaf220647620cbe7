"""Answers in the shapes that the completions route speaks: OpenAI's, whole or streamed, and one event per finished
choice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict

from engine.schema import CompletionBody
from engine.types import Completion, Delta, EngineError, GenerateRequest
from engine.wire import Json, completion_to_json, error_to_json

Events = AsyncGenerator[Completion | Delta, None]

_KEEP_ALIVE_SECONDS = 15.0
_DONE = "data: [DONE]\n\n"


async def whole_answer(body: CompletionBody, request: GenerateRequest, events: Events) -> Json:
    """OpenAI's ``text_completion`` with every choice, when all are finished."""
    async with aclosing(events):
        completions = [event async for event in events if isinstance(event, Completion)]
    completions.sort(key=lambda completion: completion.index)
    choices = [_choice(body, request, completion, completion.text) for completion in completions]
    return _envelope(request, choices) | {"usage": _usage(completions)}


def streamed_answer(body: CompletionBody, request: GenerateRequest, events: Events) -> AsyncGenerator[str, None]:
    """The same as server-sent events, in the form that the body asks for."""
    chunks = _choice_events(events) if body.stream_choices else _openai_events(body, request, events)
    return _keep_alive(_errors_as_events(chunks))


async def _choice_events(events: Events) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completion):
                yield _event({"completion": completion_to_json(event)})
            else:
                yield _event({"delta": asdict(event)})
    yield _DONE


async def _openai_events(body: CompletionBody, request: GenerateRequest, events: Events) -> AsyncGenerator[str, None]:
    completions: list[Completion] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completion):
                completions.append(event)
                # Its text and tokens went out before, as deltas.
                last = _choice(body, request, event, "")
                last.pop("token_ids", None)
                yield _event(_envelope(request, [last]))
            else:
                choice: Json = {"index": event.index, "text": event.text, "finish_reason": None, "logprobs": None}
                if not body.include_stop_str_in_output:
                    # The start of a stop string is held back until it is decided, so it lies within one delta.
                    choice["text"] = _before_stop(event.text, request.sampling.stop)
                if body.return_token_ids:
                    choice["token_ids"] = event.token_ids
                yield _event(_envelope(request, [choice]))
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event(_envelope(request, []) | {"usage": _usage(completions)})
    yield _DONE


async def _errors_as_events(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The status line is out already, so an error can only be told as an event."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except EngineError as error:
            yield _event(error_to_json(error)[1])


async def _keep_alive(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Sends a comment now and then while the engine is silent, so that neither end takes the connection for dead."""
    async with aclosing(chunks):
        waiting = asyncio.ensure_future(anext(chunks, None))
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=_KEEP_ALIVE_SECONDS)
                if not done:
                    yield ": keep-alive\n\n"
                    continue
                chunk = waiting.result()
                if chunk is None:
                    return
                yield chunk
                waiting = asyncio.ensure_future(anext(chunks, None))
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})


def _choice(body: CompletionBody, request: GenerateRequest, completion: Completion, text: str) -> Json:
    if not body.include_stop_str_in_output and isinstance(completion.stop, str):
        text = _before_stop(text, request.sampling.stop)
    reason = "length" if completion.finish_reason == "context" else completion.finish_reason
    choice: Json = {
        "index": completion.index,
        "text": text,
        "finish_reason": reason,
        "stop_reason": completion.stop,
        "logprobs": None,
        "logprob_sum": completion.logprob,
    }
    return choice | {"token_ids": completion.token_ids} if body.return_token_ids else choice


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that ends first; all of it when there is none."""
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


def _envelope(request: GenerateRequest, choices: list[Json]) -> Json:
    return {
        "id": request.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": choices,
    }


def _usage(completions: Sequence[Completion]) -> Json:
    prompt = max((completion.prompt_tokens for completion in completions), default=0)
    cached = min((completion.cached_tokens for completion in completions), default=0)
    generated = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _event(value: Json) -> str:
    # In ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
    return f"data: {json.dumps(value)}\n\n"
