"""Client of our own server, whose API has branches with their own seeds, scoring and pins."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict

from engine.protocol.request_checks import check_no_thinking_limit, has_ids, require_ids
from engine.protocol.types import (
    EngineUnavailable,
    Events,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TokenIds,
    TokenizeRequest,
    Tokens,
)
from engine.protocol.wire import Json, read_completion, read_delta, read_models, read_score_results
from engine.remote.connection import Connection

_DEFAULTS = asdict(SamplingParams())


class NativeEngine:
    """``EngineClient`` for our own server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> Events:
        check_no_thinking_limit(request)
        num_missing = len(request.branches)
        async with aclosing(self._connection.events("/v1/completions", _generate_body(request, stream))) as events:
            async for event in events:
                if "delta" in event:
                    yield read_delta(event["delta"])
                elif "completion" in event:
                    num_missing -= 1
                    yield read_completion(event["completion"])
                else:
                    raise EngineUnavailable(f"the engine at {self._connection.url} sent an unknown event: {event}")
        if num_missing:
            raise EngineUnavailable(f"the engine at {self._connection.url} left {num_missing} branches unfinished")

    async def score(self, request: ScoreRequest) -> list[ScoreResult]:
        body = {
            "request_id": request.request_id,
            "model": request.model,
            "items": [_write_item(item) for item in request.items],
            "token_ids": require_ids(request.token_ids),
            "max_compute": request.max_compute,
            **({"probe": True} if request.probe else {}),
            **({"normalized": True} if request.normalized else {}),
            **_scheduling_fields(request),
        }
        answer = await self._connection.call("POST", "/v1/score", body)
        return read_score_results(answer["results"])

    async def abort(self, request_id: str) -> None:
        await self._connection.call("POST", "/v1/abort", {"request_id": request_id})

    async def release(self, pin_key: str, tokens: Tokens | None = None) -> None:
        if tokens is None or has_ids(tokens):  # no branch of a server that only chats is cached there
            await self._connection.call("POST", "/v1/leases/release", {"lease": pin_key, "tokens": tokens})

    async def tokenize(self, request: TokenizeRequest) -> TokenIds:
        return await self._connection.tokenize(request)

    async def models(self) -> list[ModelInfo]:
        return read_models((await self._connection.call("GET", "/v1/models", None, should_wait=False))["data"])

    async def clear_cache(self) -> None:
        await self._connection.call("POST", "/v1/cache/clear", {})

    async def close(self) -> None:
        await self._connection.close()


def _generate_body(request: GenerateRequest, stream: bool) -> Json:
    """Return the body with the prompt once for all branches, and without settings that have their default."""
    sampling = asdict(request.sampling)
    if request.sampling.logit_bias:
        sampling["logit_bias"] = dict(request.sampling.logit_bias)
    body: Json = {
        "request_id": request.request_id,
        "model": request.model,
        "prompt": require_ids(request.prompt, "prompt"),
        "branches": [
            {"seed": b.seed, "key": b.key, "max_tokens": b.max_tokens}
            | ({"generated": require_ids(b.generated, "branches.generated")} if b.generated else {})
            | ({} if b.constraint_start is None else {"constraint_start": b.constraint_start})
            for b in request.branches
        ],
        "stream_choices": True,
        "stream": stream,
        **{name: value for name, value in sampling.items() if value != _DEFAULTS[name]},
        **_scheduling_fields(request),
        **({} if request.draft else {"draft": False}),
        **({"probe": True} if request.probe else {}),
        **({} if request.constraint is None else {"structured_outputs": request.constraint.to_json()}),
        **({"lifts_constraint": request.constraint_escape_tokens} if request.constraint_escape_tokens else {}),
    }
    return body if request.timeout is None else body | {"timeout": request.timeout}


def _write_item(item: ScoreItem) -> Json:
    parts: list[str | TokenIds] = [
        part if isinstance(part, str) else require_ids(part, "items.parts") for part in item.parts
    ]
    body: Json = {"parts": parts, "read": item.read}
    return body if item.key_bound is None else body | {"key_bound": asdict(item.key_bound)}


def _scheduling_fields(request: GenerateRequest | ScoreRequest) -> Json:
    fields = {"priority": request.priority, "lease": request.pin_key, "cache_salt": request.cache_salt}
    return {name: value for name, value in fields.items() if value}
