"""Answers in the shapes that the completions route speaks: OpenAI's, whole or streamed, and one event per finished
choice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from anyio import CancelScope

from engine.protocol.streams import Events
from engine.protocol.types import Completion, EngineError, GenerateRequest, TokenLogprob
from engine.protocol.wire import Json, completion_to_json, error_to_json
from engine.server.openai_logprobs import logprobs_object, prompt_logprobs
from engine.server.schema import CompletionBody
from engine.text.tokenizer import Tokenizer

_KEEP_ALIVE_SECONDS = 15.0
_DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class CompletionCall:
    """What a client of the completions route wants to hear."""

    body: CompletionBody
    requests: Sequence[GenerateRequest]
    """One for each prompt."""
    tokenizer: Tokenizer

    def prompt(self, index: int) -> tuple[GenerateRequest, str | list[int]]:
        """The request and the prompt, as it was written, of a choice."""
        place = index // self.body.width
        return self.requests[place], self.body.prompts[place]

    def echo(self, index: int) -> str:
        """What a choice's text starts with."""
        if not self.body.echo:
            return ""
        _, prompt = self.prompt(index)
        return prompt if isinstance(prompt, str) else self.tokenizer.decode_all(prompt)

    def name(self, token: int) -> str:
        """How log-probabilities call a token."""
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else self.tokenizer.piece(token)


async def build_response(asked: CompletionCall, events: Events) -> Json:
    """OpenAI's ``text_completion`` with every choice, when all are finished."""
    async with aclosing(events):
        completions = [event async for event in events if isinstance(event, Completion)]
    completions.sort(key=lambda completion: completion.index)
    # A prompt is read once, with its first branch; all its choices tell of it.
    heard = {c.index // asked.body.width: c.prompt_logprobs for c in completions if c.prompt_logprobs is not None}
    choices = []
    for completion in completions:
        prompt = heard.get(completion.index // asked.body.width)
        choice = _choice(asked, completion, completion.text)
        choice["text"] = asked.echo(completion.index) + choice["text"]
        choice["logprobs"] = _logprobs(asked, completion, prompt)
        if asked.body.prompt_logprobs is not None and prompt is not None:
            choice["prompt_logprobs"] = prompt_logprobs(asked.name, prompt)
        if asked.body.return_token_ids:
            choice["prompt_token_ids"] = asked.prompt(completion.index)[0].prompt
        choices.append(choice)
    return _envelope(asked, choices) | {"usage": _usage(asked, completions)}


def stream_response(asked: CompletionCall, events: Events) -> AsyncGenerator[str, None]:
    """The same as server-sent events, in the form that the body asks for."""
    chunks = _choice_events(events) if asked.body.stream_choices else _openai_events(asked, events)
    return _keep_alive(_errors_as_events(chunks))


async def _choice_events(events: Events) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completion):
                yield _event({"completion": completion_to_json(event)})
            else:
                yield _event({"delta": asdict(event)})
    yield _DONE


async def _openai_events(asked: CompletionCall, events: Events) -> AsyncGenerator[str, None]:
    body = asked.body
    completions: list[Completion] = []
    echoes = {index: asked.echo(index) for index in range(len(asked.requests) * body.width)}
    offsets = {index: len(echo) for index, echo in echoes.items()}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completion):
                completions.append(event)
                # Its text and tokens went out before, as deltas.
                last = _choice(asked, event, echoes.pop(event.index, ""))
                last.pop("token_ids", None)
                yield _event(_envelope(asked, [last]))
            else:
                text = echoes.pop(event.index, "") + event.text
                choice: Json = {"index": event.index, "text": text, "finish_reason": None, "logprobs": None}
                if event.logprobs is not None:
                    start = offsets[event.index]
                    choice["logprobs"] = logprobs_object(asked.name, event.token_ids, event.logprobs, start)
                    offsets[event.index] += sum(len(name) for name in choice["logprobs"]["tokens"])
                if body.return_token_ids:
                    choice["token_ids"] = event.token_ids
                yield _event(_envelope(asked, [choice]))
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event(_envelope(asked, []) | {"usage": _usage(asked, completions)})
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
            # When the client is gone, every wait outside of such a scope is cancelled at once.
            with CancelScope(shield=True):
                await asyncio.wait({waiting})


def _choice(asked: CompletionCall, completion: Completion, text: str) -> Json:
    body = asked.body
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


def _logprobs(
    asked: CompletionCall, completion: Completion, prompt: Sequence[TokenLogprob | None] | None
) -> Json | None:
    if completion.logprobs is None:
        return None
    tokens = completion.token_ids
    found: Sequence[TokenLogprob | None] = completion.logprobs
    if asked.body.echo and prompt is not None:
        tokens, found = asked.prompt(completion.index)[0].prompt + tokens, (*prompt, *found)
    return logprobs_object(asked.name, tokens, found)


def _envelope(asked: CompletionCall, choices: list[Json]) -> Json:
    return {
        "id": asked.requests[0].request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.body.model,
        "choices": choices,
    }


def _usage(asked: CompletionCall, completions: Sequence[Completion]) -> Json:
    """Each prompt counts once, whatever ``n`` is."""
    prompts: dict[int, int] = {}
    cached: dict[int, int] = {}
    for completion in completions:
        place = completion.index // asked.body.width
        prompts[place] = max(prompts.get(place, 0), completion.prompt_tokens)
        cached[place] = min(cached.get(place, completion.cached_tokens), completion.cached_tokens)
    prompt, generated = sum(prompts.values()), sum(len(completion.token_ids) for completion in completions)
    accepted = sum(completion.accepted_tokens for completion in completions)
    rejected = sum(completion.drafted_tokens for completion in completions) - accepted
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def _event(value: Json) -> str:
    # In ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
    return f"data: {json.dumps(value)}\n\n"
