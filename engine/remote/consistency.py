"""Check that a server computes what it says: the text that it writes, and the same text read as a prompt, have the same
log-probabilities.

A server may list its models, answer every request, and still compute something else while it writes, for example by
attention kernels that do not fit the processor. Reading a prompt takes other kernels than writing token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.protocol.types import (
    Branch,
    Capability,
    Completion,
    EngineClient,
    EngineError,
    GenerateRequest,
    ModelInfo,
    NotSupported,
    SamplingParams,
    TokenizeRequest,
    Tokens,
)
from engine.protocol.wire import Json
from engine.remote.chat.options import ChatOptions
from engine.remote.connection import Connection
from engine.remote.http import CHAT, HttpEngine

TEXT = "Once upon a time there was a clever fox. One day the fox said to the"
NUM_TOKENS = 48
MEAN_BOUND = 0.125
"""Largest allowed mean difference of two log-probabilities of a token. A logit between 16 and 32 has an error of up to
1/16 in bfloat16, so that of two passes, which round differently, is half of this in the mean at most.
"""
LARGEST_BOUND = 1.0
"""The same for one token: eight times as much, since caches of 8 bits and the choice of experts move single tokens
further. Under the right model most tokens of a wrong one lose several units.
"""
Verdict = Literal["consistent", "differs", "unknown", "unreachable"]
_STANDARD_FIELDS = {"id", "object", "created", "owned_by", "permission", "parent"}
"""Fields of OpenAI's model object, which say nothing about how the model is served."""
_LONGEST_FLAG = 100
"""Characters of a flag's value; longer ones, such as chat templates, are no flags."""


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Log-probabilities of a token of a greedy text."""

    written: float
    read: float
    likeliest: float
    """The value of the likeliest token when the text is read, which a greedy one should be."""

    @property
    def difference(self) -> float:
        """The larger of two differences that should be 0."""
        values = abs(self.written - self.read), self.likeliest - self.read
        return math.inf if any(map(math.isnan, values)) else max(values)


@dataclass(frozen=True, slots=True)
class Consistency:
    """Result for one model of one server."""

    model: str
    url: str
    server: str
    """Its version, and the fields of its list of models that tell how the model is served."""
    verdict: Verdict
    detail: str


async def check_server(
    url: str,
    *,
    models: Sequence[str] = (),
    api_key: str | None = None,
    tokenizer: Path | None = None,
    dialect: str | None = None,
    chat: ChatOptions | None = None,
) -> list[Consistency]:
    """Check the models of a server: those named, or all that generate.

    The arguments are those of ``HttpEngine``. Raises ``EngineError`` if the server cannot be asked at all.
    """
    connection = Connection(url, api_key=api_key)
    engine = HttpEngine(url, api_key=api_key, tokenizer=tokenizer, dialect=dialect, chat=chat)
    try:
        if dialect == CHAT:  # whose requests cost money, and would tell nothing
            detail = "a chat server reports no log-probabilities of a prompt"
            return [Consistency(name, connection.url, server=CHAT, verdict="unknown", detail=detail) for name in models]
        entries = {entry["id"]: entry for entry in (await connection.call("GET", "/v1/models", None))["data"]}
        version = await find_version(connection)
        results = [
            Consistency(
                name, connection.url, server="", verdict="unreachable", detail=f"the server serves no model {name!r}"
            )
            for name in models
            if name not in entries
        ]
        for info in await engine.models():
            if info.kind == "generate" and (not models or info.id in models):
                verdict, detail = await _check_model(engine, connection, info)
                server = describe_server(str(info.extra.get("server", "reasoner")), version, entries.get(info.id, {}))
                results.append(Consistency(info.id, connection.url, server=server, verdict=verdict, detail=detail))
        return results
    finally:
        await engine.close()
        await connection.close()


async def find_version(connection: Connection) -> str:
    """Return the server's version if it tells one (vLLM's ``/version``)."""
    try:
        answer = await connection.call("GET", "/version", None, should_wait=False)
    except EngineError:  # most others have no such path
        return ""
    version = answer.get("version") if isinstance(answer, dict) else answer
    return version if isinstance(version, str) else ""


def describe_server(kind: str, version: str, entry: Json) -> str:
    """Return the kind and version of a server, and the fields of its list of models that tell how it serves one."""
    flags = [
        f"{name} {value}"
        for name, value in entry.items()
        if name not in _STANDARD_FIELDS and _is_flag(value) and value != entry.get("id")
    ]
    return ", ".join((f"{kind} {version}".strip(), *flags))


def _is_flag(value: object) -> bool:
    """Return whether a value is a name or a number; a boolean tells what a server can do."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    return len(str(value)) <= _LONGEST_FLAG and str(value).isprintable()


async def _check_model(engine: EngineClient, connection: Connection, info: ModelInfo) -> tuple[Verdict, str]:
    count = min(NUM_TOKENS, info.context // 3)
    try:
        if Capability.PROMPT_LOGPROBS not in info.capabilities:
            tokens = await _compare_by_echo(connection, info.id, count)
        else:
            tokens = await _compare_by_tokens(engine, info.id, count)
    except EngineError as error:
        return "unknown", f"cannot be checked: {error}"
    return judge(tokens)


def judge(tokens: Sequence[TokenCheck]) -> tuple[Verdict, str]:
    """Return the verdict on the log-probabilities of a text, and the reason in words."""
    if not tokens:
        return "unknown", "cannot be checked: the server reports no log-probabilities of a text and of a prompt"
    differences = [token.difference for token in tokens]
    largest, mean = max(differences), sum(differences) / len(differences)
    where = differences.index(largest)
    found = f"{largest:.2g} at token {where + 1} of {len(tokens)}, {mean:.2g} in the mean"
    if largest <= LARGEST_BOUND and mean <= MEAN_BOUND:
        return "consistent", f"reads what it writes: log-probabilities differ by {found}"
    worst = tokens[where]
    return "differs", (
        f"computes something else when it writes than when it reads the same text: log-probabilities differ by {found} "
        f"(written {worst.written:.2f}, read {worst.read:.2f} where the likeliest has {worst.likeliest:.2f}; up to "
        f"{LARGEST_BOUND:g} is allowed, {MEAN_BOUND:g} in the mean). Try other flags or another version of the server"
    )


async def _compare_by_tokens(engine: EngineClient, model: str, count: int) -> list[TokenCheck]:
    """Write with log-probabilities, and ask for those of the same tokens as a prompt."""
    prompt = await engine.tokenize(TokenizeRequest(model, TEXT))
    written = await _generate(engine, model, prompt, count, logprobs=1)
    text = (*prompt, *written.token_ids)
    read = await _generate(engine, model, text, 0, prompt_logprobs=1)
    own, theirs = written.logprobs or (), (read.prompt_logprobs or ())[len(prompt) :]
    return [
        TokenCheck(one.logprob, other.logprob, max((value for _, value in other.top), default=other.logprob))
        for one, other in zip(own, theirs, strict=False)
        if other is not None
    ]


async def _generate(engine: EngineClient, model: str, prompt: Tokens, count: int, **sampling: int) -> Completion:
    settings = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
    request = GenerateRequest("check", model, prompt=prompt, branches=(Branch(0, 0, count),), sampling=settings)
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Completion):
                return event
    raise EngineError("the server sent no completion")


async def _compare_by_echo(connection: Connection, model: str, count: int) -> list[TokenCheck]:
    """Write by OpenAI's completions, and let the server echo the text with its log-probabilities.

    A server may split the text otherwise when it reads it: tokens are matched by their place in it.
    """
    common: Json = {"model": model, "temperature": 0.0, "logprobs": 1}
    answer = await connection.call("POST", "/v1/completions", common | {"prompt": TEXT, "max_tokens": count})
    text, written = _read_tokens(answer)
    if not written:
        return []
    body = common | {"prompt": TEXT + text, "max_tokens": 1, "echo": True}
    _, read = _read_tokens(await connection.call("POST", "/v1/completions", body))
    echoed = "".join(token for token, _ in read)
    if not echoed.removeprefix(" ").startswith(TEXT):
        return []
    by_place = _locate(read, -echoed.index(TEXT))  # SentencePiece begins with a space
    pairs = [(own, by_place.get(place)) for place, own in _locate(written, len(TEXT)).items()]
    tokens = [TokenCheck(own, other, other) for own, other in pairs if other is not None]
    if len(tokens) < len(written) // 4:
        raise NotSupported("the server splits the text into other tokens when it reads it")
    return tokens


def _locate(tokens: Sequence[tuple[str, float | None]], start: int) -> dict[tuple[int, str], float]:
    """Return the log-probabilities of tokens by their places, the first of which is ``start``, and their texts."""
    located = {}
    for token, value in tokens:
        if value is not None:
            located[start, token] = value
        start += len(token)
    return located


def _read_tokens(answer: Json) -> tuple[str, list[tuple[str, float | None]]]:
    """Return the text of a completion, and its tokens with their log-probabilities, if it has any."""
    try:
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs") or {}
        tokens = list(zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=False))
        return choice["text"], tokens
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(f"the completion is not understood: {error!r}") from error
