"""``python -m benchmarks.service.null_engine SOCKET SECONDS``: an engine without a model, with our server's protocol.

Its output is a hash of the request, so a search gives the same result in every system. A token takes SECONDS, in which
the engine sleeps and leaves the processor to the system that runs the search.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.protocol.types import Completion, ModelInfo, ScoreResult
from engine.protocol.wire import write_model

POLICY, VERIFIER = "null", "null-verifier"
STEPS = 8
"""Steps of a solution; the last one states the answer."""
STEP_TOKENS = 16
_SCORE_TOKENS = 2
"""Duration of a score in tokens."""
_END, _SEPARATOR, _WORDS = 0, 1, 10
_CONTEXT = 4096
_PRM = {"reasoner_prm": {"format": "token_classification", "separator": "\n\n", "positive_label": 1}}


class NullEngine:
    """``app`` is its server. ``asked`` counts branches, tokens and scores, and ``GET /asked`` returns it."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: time for a token."""
        self.asked = {"branches": 0, "tokens": 0, "scores": 0}
        self._seconds = seconds
        self._aborts: dict[str, asyncio.Event] = {}
        self.app = Starlette(
            routes=[
                Route("/asked", self._asked),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/score", self._score, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/abort", self._abort, methods=["POST"]),
                Route("/v1/leases/release", self._nothing, methods=["POST"]),
                Route("/v1/cache/clear", self._nothing, methods=["POST"]),
            ]
        )

    async def _nothing(self, _: Request) -> Response:
        return JSONResponse({})

    async def _abort(self, request: Request) -> Response:
        if (aborted := self._aborts.get((await request.json())["request_id"])) is not None:
            aborted.set()
        return JSONResponse({})

    async def _asked(self, _: Request) -> Response:
        return JSONResponse(self.asked)

    async def _models(self, _: Request) -> Response:
        served = [
            ModelInfo(POLICY, "generate", _CONTEXT, 100, 1000, fingerprint="null"),
            ModelInfo(VERIFIER, "classify", _CONTEXT, 100, 1000, dict(_PRM), fingerprint="null"),
        ]
        return JSONResponse({"data": [{"owned_by": "reasoner", **write_model(info)} for info in served]})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        text = body["prompt"] if "prompt" in body else "".join(message["content"] for message in body["messages"])
        tokens = [_SEPARATOR] if text == "\n\n" else [_WORDS + ord(char) % 80 for char in text]
        return JSONResponse({"tokens": tokens})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.asked["branches"] += len(body["branches"])
        return StreamingResponse(self._finished(body), media_type="text/event-stream")

    async def _finished(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Yield the branches as they end, the shortest first; those of an aborted request at once, without tokens."""
        aborted = self._aborts[body["request_id"]] = asyncio.Event()
        try:
            async for completion in self._generate(body, aborted):
                yield f"data: {json.dumps({'completion': asdict(completion)})}\n\n"
        finally:
            del self._aborts[body["request_id"]]
        yield "data: [DONE]\n\n"

    async def _generate(self, body: dict[str, Any], aborted: asyncio.Event) -> AsyncIterator[Completion]:
        completions = [_completion(index, body) for index in range(len(body["branches"]))]
        self.asked["tokens"] += sum(len(completion.token_ids) for completion in completions)
        now = 0
        for completion in sorted(completions, key=lambda completion: len(completion.token_ids)):
            if seconds := (len(completion.token_ids) - now) * self._seconds:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), seconds)
            now = len(completion.token_ids)
            if aborted.is_set():
                yield replace(completion, token_ids=(), text="", finish_reason="cancelled", stop=None, logprob=0.0)
            else:
                yield completion

    async def _score(self, request: Request) -> Response:
        body = await request.json()
        self.asked["scores"] += len(body["items"])
        await asyncio.sleep(_SCORE_TOKENS * self._seconds)
        results = [_scored(index, item, body["max_compute"]) for index, item in enumerate(body["items"])]
        return JSONResponse({"results": [asdict(result) for result in results]})


def _completion(index: int, body: dict[str, Any]) -> Completion:
    """Generate to the end of the step if that is a stop string, else to the end of the solution."""
    branch = body["branches"][index]
    path = [*body["prompt"], *branch.get("generated", ())]
    said: list[tuple[int, str]] = []
    steps = path.count(_SEPARATOR)
    while True:
        steps += 1
        draw = _draw(branch["seed"], branch["key"], len(path), steps)
        length = STEP_TOKENS // 2 + draw[0] % (STEP_TOKENS // 2)
        said += [(_WORDS + byte % 80, f"w{byte % 80} ") for byte in draw[1:length]]
        if steps >= STEPS:
            said += [(_WORDS + draw[0] % 3, f"\\boxed{{{draw[0] % 3}}}"), (_END, "")]
            break
        said.append((_SEPARATOR, "\n\n"))
        if "\n\n" in body.get("stop", ()):
            break
    cut = said[: branch["max_tokens"]]
    whole = len(cut) == len(said)
    return Completion(
        index=index,
        token_ids=tuple(token for token, _ in cut),
        text="".join(text for _, text in cut),
        finish_reason="stop" if whole else "length",
        stop=(said[-1][1] or _END) if whole else None,
        logprob=-float(len(cut)),
        prompt_tokens=len(path),
        cached_tokens=len(path) - 1,
    )


def _scored(index: int, item: dict[str, Any], most: int | None) -> ScoreResult:
    """Compute only the last part; the other parts count as cached. No values if it exceeds ``most``."""
    computed = max(1, len(item["parts"][-1]))
    if most is not None and computed > most:
        return ScoreResult(index, None, computed, 0)
    values = tuple((0.0, _draw(item["parts"][: read + 1])[0] / 64 - 2) for read in item["read"])
    return ScoreResult(index, values, computed, sum(map(len, item["parts"][:-1])))


def _draw(*parts: object) -> bytes:
    return blake2b(json.dumps(parts).encode(), digest_size=STEP_TOKENS).digest()


def main() -> None:
    """Serve until SIGTERM."""
    engine = NullEngine(float(sys.argv[2]))
    uvicorn.run(engine.app, uds=sys.argv[1], log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
