"""The requests that a search sent to its servers, repeated by a bare script in the same order."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.protocol.wire import Json
from engine.remote.connection import Connection

_TIMEOUT = httpx.Timeout(60.0)


@dataclass(slots=True)
class Sent:
    """A request, with the times of its start and its end."""

    url: str
    path: str
    body: Json
    started: float
    ended: float = 0.0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """The token ids of its samples."""


@dataclass(slots=True)
class Traffic:
    """The requests of one search, in the order of their starts."""

    sent: list[Sent] = field(default_factory=list)

    @property
    def sequences(self) -> list[tuple[list[int], list[list[int]]]]:
        """The prompts of completions, each with the samples that followed it."""
        asked = [one for one in self.sent if one.path == "/v1/completions"]
        return [
            (one.body["prompt"], [one.outputs.get(index, []) for index in range(one.body.get("n", 1))]) for one in asked
        ]

    async def repeat(self) -> float:
        """Send all requests again and return the seconds.

        Each starts as soon as those have ended that had ended before it started. A salt is replaced by another one, so
        that the server's cache is as empty as it was.
        """
        salt = uuid.uuid4().hex
        done = [asyncio.Event() for _ in self.sent]
        async with httpx.AsyncClient(
            trust_env=False, timeout=_TIMEOUT, limits=httpx.Limits(max_connections=None)
        ) as http:

            async def send(index: int, one: Sent) -> None:
                for earlier, other in enumerate(self.sent):
                    if other.ended <= one.started:
                        await done[earlier].wait()
                body = one.body | ({"cache_salt": salt} if "cache_salt" in one.body else {})
                async with http.stream("POST", one.url + one.path, json=body) as answer:
                    answer.raise_for_status()
                    async for _ in answer.aiter_bytes():
                        pass
                done[index].set()

            started = time.perf_counter()
            await asyncio.gather(*(send(*item) for item in enumerate(self.sent)))
            return time.perf_counter() - started


@contextmanager
def recorded() -> Iterator[Traffic]:
    """Record the posts of all connections of this process to servers other than ours."""
    traffic = Traffic()
    events, call = Connection.events, Connection.call

    async def record_events(
        self: Connection, path: str, body: Json, headers: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncGenerator[Json, None]:
        sent = Sent(self.url, path, body, time.perf_counter())
        traffic.sent.append(sent)
        async for event in events(self, path, body, headers, **options):
            for choice in event.get("choices") or ():
                sent.outputs.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
            yield event
        sent.ended = time.perf_counter()

    async def record_call(self: Connection, method: str, path: str, body: Json | None, **options: Any) -> Any:
        if body is None or path == "/tokenize":
            return await call(self, method, path, body, **options)
        sent = Sent(self.url, path, body, time.perf_counter())
        traffic.sent.append(sent)
        answer = await call(self, method, path, body, **options)
        sent.ended = time.perf_counter()
        return answer

    Connection.events, Connection.call = record_events, record_call  # type: ignore[method-assign]
    try:
        yield traffic
    finally:
        Connection.events, Connection.call = events, call  # type: ignore[method-assign]


def ideal_prompt_tokens(sequences: list[tuple[list[int], list[list[int]]]], block: int) -> int:
    """Return the prompt tokens that a cache of whole blocks must compute if it keeps all that was read or generated.

    ``sequences``: prompts, each with its samples. Samples of one request read the prompt of the first. A prompt's last
    token is always computed.
    """
    cached: set[tuple[int, ...]] = set()
    computed = 0
    for prompt, samples in sequences:
        for sample in samples:
            blocks = 0
            while (blocks + 1) * block < len(prompt) and tuple(prompt[: (blocks + 1) * block]) in cached:
                blocks += 1
            computed += len(prompt) - blocks * block
            whole = (*prompt, *sample)
            cached.update(whole[: end * block] for end in range(1, len(whole) // block + 1))
    return computed
