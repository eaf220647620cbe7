"""Responses of the completions route: OpenAI's shape, whole or streamed, and one event for each finished choice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from anyio import CancelScope

from engine.protocol.request_checks import require_ids
from engine.protocol.types import Completion, EngineError, Events, GenerateRequest, TokenLogprob
from engine.protocol.wire import Json, error_to_json
from engine.server.schema import CompletionBody
from engine.server.token_names import TextOffsets, TokenNamer, place_prompt
from engine.text.detokenizer import find_incomplete_end
from engine.text.tokenizer import Tokenizer

_KEEP_ALIVE_SECONDS = 15.0
_DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class CompletionCall:
    """A validated call of the completions route."""

    body: CompletionBody
    requests: Sequence[GenerateRequest]
    """One for each prompt."""
    tokenizer: Tokenizer

    def prompt(self, index: int) -> tuple[GenerateRequest, str | list[int]]:
        """Return the request of a choice, and its prompt as the client sent it."""
        prompt_index = index // self.body.width
        return self.requests[prompt_index], self.body.prompts[prompt_index]

    def echo(self, index: int) -> str:
        """Return the echoed prompt with which the text of a choice begins."""
        if not self.body.echo:
            return ""
        _, prompt = self.prompt(index)
        if isinstance(prompt, str):
            return prompt
        text = self.tokenizer.decode_all(prompt)
        # A character that the prompt ends in is part of what follows.
        return text.rstrip("\ufffd") if self.body.max_tokens and self.incomplete_end(index) else text

    def incomplete_end(self, index: int) -> Sequence[int]:
        """Return the end of a choice's prompt if it is inside a character."""
        return find_incomplete_end(self.tokenizer, require_ids(self.prompt(index)[0].prompt))

    @property
    def namer(self) -> TokenNamer:
        return TokenNamer(self.tokenizer, by_id=self.body.return_tokens_as_token_ids)

    def offsets(self, index: int) -> TextOffsets:
        """Return the offsets of a choice's generated tokens."""
        return TextOffsets(self.tokenizer, len(self.echo(index)), self.incomplete_end(index))


async def build_response(call: CompletionCall, events: Events) -> Json:
    """Return OpenAI's ``text_completion`` when all choices are finished."""
    async with aclosing(events):
        completions = [event async for event in events if isinstance(event, Completion)]
    completions.sort(key=lambda completion: completion.index)
    # The log-probabilities of a prompt come with its first branch and belong to all its choices.
    by_prompt = {c.index // call.body.width: c.prompt_logprobs for c in completions if c.prompt_logprobs is not None}
    choices = []
    for completion in completions:
        prompt = by_prompt.get(completion.index // call.body.width)
        choice = _build_choice(call, completion, completion.text)
        choice["text"] = call.echo(completion.index) + choice["text"]
        choice["logprobs"] = _build_logprobs(call, completion, prompt)
        if call.body.prompt_logprobs is not None and prompt is not None:
            choice["prompt_logprobs"] = _prompt_logprobs(call.namer, prompt)
        if call.body.return_token_ids:
            choice["prompt_token_ids"] = call.prompt(completion.index)[0].prompt
        choices.append(choice)
    return _build_envelope(call, choices) | {"usage": _build_usage(call, completions)}


def stream_response(call: CompletionCall, events: Events) -> AsyncGenerator[str, None]:
    """Return the response as server-sent events, in the shape that the body requests."""
    chunks = _choice_events(events) if call.body.stream_choices else _openai_events(call, events)
    return _keep_alive(_errors_as_events(chunks))


async def _choice_events(events: Events) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for event in events:
            yield _format_event({"completion" if isinstance(event, Completion) else "delta": asdict(event)})
    yield _DONE


async def _openai_events(call: CompletionCall, events: Events) -> AsyncGenerator[str, None]:
    body = call.body
    completions: list[Completion] = []
    echoes = {index: call.echo(index) for index in range(len(call.requests) * body.width)}
    offsets = {index: call.offsets(index) for index in echoes} if body.logprobs is not None else {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completion):
                completions.append(event)
                # Its text and tokens were sent before, as deltas.
                last = _build_choice(call, event, echoes.pop(event.index, ""))
                last.pop("token_ids", None)
                yield _format_event(_build_envelope(call, [last]))
            else:
                text = echoes.pop(event.index, "") + event.text
                choice: Json = {"index": event.index, "text": text, "finish_reason": None, "logprobs": None}
                if event.logprobs is not None:
                    ids = require_ids(event.token_ids)
                    names = [call.namer.name(token) for token in ids]
                    places = offsets[event.index].add(ids)
                    choice["logprobs"] = _logprobs_object(call.namer, names, places, event.logprobs)
                if body.return_token_ids:
                    choice["token_ids"] = event.token_ids
                yield _format_event(_build_envelope(call, [choice]))
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _format_event(_build_envelope(call, []) | {"usage": _build_usage(call, completions)})
    yield _DONE


async def _errors_as_events(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Send an error as an event, since the status line has been sent."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except EngineError as error:
            yield _format_event(error_to_json(error)[1])


async def _keep_alive(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Send comments while the engine is silent, so that no proxy or client closes the connection."""
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


def _build_choice(call: CompletionCall, completion: Completion, text: str) -> Json:
    body = call.body
    reason = "length" if completion.finish_reason == "context" else completion.finish_reason
    choice: Json = {
        "index": completion.index,
        "text": text,
        "finish_reason": reason,
        "stop_reason": completion.stop,
        "logprobs": None,
        "logprob_sum": completion.logprob,
    }
    if body.probe:
        choice["probe"] = completion.probe
    return choice | {"token_ids": completion.token_ids} if body.return_token_ids else choice


def _build_logprobs(
    call: CompletionCall, completion: Completion, prompt: Sequence[TokenLogprob | None] | None
) -> Json | None:
    if completion.logprobs is None:
        return None
    ids = require_ids(completion.token_ids)
    names = [call.namer.name(token) for token in ids]
    offsets = call.offsets(completion.index).add(ids)
    logprobs: Sequence[TokenLogprob | None] = completion.logprobs
    if call.body.echo and prompt is not None:
        prompt_ids, echo = require_ids(call.prompt(completion.index)[0].prompt), call.echo(completion.index)
        prompt_names, prompt_offsets = place_prompt(call.namer, call.tokenizer, prompt_ids, echo)
        names, offsets, logprobs = prompt_names + names, prompt_offsets + offsets, (*prompt, *logprobs)
    return _logprobs_object(call.namer, names, offsets, logprobs)


def _logprobs_object(
    namer: TokenNamer,
    names: Sequence[str],
    offsets: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
) -> Json:
    """Return OpenAI's ``logprobs`` of a choice.

    ``top_logprobs`` includes the token itself besides the most likely ones. The first token of a prompt has ``null``
    for both.
    """
    return {
        "tokens": names,
        "token_logprobs": [None if token is None else token.logprob for token in logprobs],
        "top_logprobs": [
            None if token is None else namer.name_top(token, name) for token, name in zip(logprobs, names, strict=True)
        ],
        "text_offset": offsets,
    }


def _prompt_logprobs(namer: TokenNamer, logprobs: Sequence[TokenLogprob | None]) -> list[Json | None]:
    """Return vLLM's ``prompt_logprobs``: for each token but the first, itself and the most likely ones by id."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": logprob, "decoded_token": namer.name(token)}
            for token, logprob in ((position.token_id, position.logprob), *position.top)
        }
        for position in logprobs
    ]


def _build_envelope(call: CompletionCall, choices: list[Json]) -> Json:
    return {
        "id": call.requests[0].request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": call.body.model,
        "choices": choices,
    }


def _build_usage(call: CompletionCall, completions: Sequence[Completion]) -> Json:
    """Return the usage; each prompt counts once, whatever ``n`` is."""
    prompts: dict[int, int] = {}
    cached: dict[int, int] = {}
    for completion in completions:
        prompt_index = completion.index // call.body.width
        prompts[prompt_index] = max(prompts.get(prompt_index, 0), completion.prompt_tokens)
        cached[prompt_index] = min(cached.get(prompt_index, completion.cached_tokens), completion.cached_tokens)
    prompt, generated = sum(prompts.values()), sum(len(completion.token_ids) for completion in completions)
    accepted = sum(completion.accepted_tokens for completion in completions)
    rejected = sum(completion.drafted_tokens for completion in completions) - accepted
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
    }


def _format_event(value: Json) -> str:
    # In ASCII: many clients end a line at U+2028 or U+0085 too, which a text may contain.
    return f"data: {json.dumps(value)}\n\n"
