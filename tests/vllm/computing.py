"""Check before a test on somebody's server that the server computes its model, by a greedy text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.core.local_engine import LocalEngine
from engine.protocol.options import EngineOptions
from engine.protocol.types import Branch, Completion, EngineClient, TokenizeRequest, TokenLogprob, Tokens
from engine.remote.connection import Connection
from engine.remote.consistency import describe_server, find_version
from engine.remote.http import HttpEngine
from tests.engine.helpers import generate
from tests.engine.remote.vllm_cases import TOLERANCE

QUESTION = [{"role": "user", "content": "Use the numbers 3, 7, 8 and 12, each exactly once, with + - * / to reach 45."}]
NUM_TOKENS = 64


@dataclass(frozen=True)
class Difference:
    """The first tokens of two greedy texts that differ, and not by rounding."""

    place: int
    theirs: str
    ours: str


def skip_unless_it_computes(url: str, name: str, model: Path, *, api_key: str | None = None) -> None:
    """Skip the test if a server writes another greedy text than our engine, which the ordinary tests hold to
    transformers' logits.
    """
    difference = asyncio.run(find_difference(url, name, model, api_key=api_key))
    if difference is not None:
        pytest.skip(
            f"{asyncio.run(_describe(url, name, api_key))} does not compute the model: after {difference.place} tokens "
            f"of a greedy text it writes {difference.theirs!r} instead of {difference.ours!r}"
        )


async def _describe(url: str, name: str, api_key: str | None) -> str:
    connection = Connection(url, api_key=api_key)
    try:
        listed = (await connection.call("GET", "/v1/models", None))["data"]
        [entry] = [one for one in listed if one["id"] == name]
        return describe_server(entry["owned_by"], await find_version(connection), entry)
    finally:
        await connection.close()


async def find_difference(url: str, name: str, model: Path, *, api_key: str | None = None) -> Difference | None:
    """Return where a server's greedy text parts from our engine's, unless either token is as likely as the other."""
    ours = LocalEngine({name: model}, EngineOptions(kv_tokens=4096, draft="off"))
    theirs = HttpEngine(url, tokenizer=model, api_key=api_key)
    try:
        context = min(info.context for info in (*await theirs.models(), *await ours.models()) if info.id == name)
        prompt = await ours.tokenize(TokenizeRequest(name, QUESTION))
        count = min(NUM_TOKENS, context - len(prompt) - 1)
        one, other = [await _complete(engine, name, prompt, count) for engine in (theirs, ours)]
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        parted = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if parted == len(pairs):
            return None if len(one.token_ids) == len(other.token_ids) else Difference(parted, one.text, other.text)
        read = await _read(ours, name, (*prompt, *one.token_ids[: parted + 1]))
        if read.logprob >= read.top[0][1] - TOLERANCE:
            return None
        tokenizer = ours.tokenizer(name)
        texts = [tokenizer.decode_all(tokens[parted : parted + 8]) for tokens in (one.token_ids, other.token_ids)]
        return Difference(parted, *texts)
    finally:
        await theirs.close()
        await ours.close()


async def _complete(engine: EngineClient, name: str, prompt: Tokens, count: int) -> Completion:
    request = generate(prompt, [Branch(1, 1, count)], model=name, temperature=0.0)
    [completion] = [event async for event in engine.generate(request) if isinstance(event, Completion)]
    return completion


async def _read(engine: EngineClient, name: str, tokens: Tokens) -> TokenLogprob:
    """Return the log-probability of the last token."""
    request = generate(tokens, [Branch(1, 1, 0)], model=name, prompt_logprobs=1)
    [completion] = [event async for event in engine.generate(request) if isinstance(event, Completion)]
    assert completion.prompt_logprobs is not None
    last = completion.prompt_logprobs[-1]
    assert last is not None
    return last
