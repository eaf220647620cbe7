"""The engine over HTTP: OpenAI's completions, and token-id, branch and scoring extensions for ``HttpEngine``."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # a fifth of the start went into looking through modules, which stay, for garbage

import argparse
import asyncio
import errno
import math
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from engine.threads import short_waits  # noqa: F401 - it has to come before torch

# isort: split
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.local_engine import LocalEngine
from engine.core.options import CoreOptions
from engine.device import DEVICES, DTYPES, KV_DTYPES
from engine.protocol.streams import Events, merge_streams
from engine.protocol.types import EngineError
from engine.protocol.wire import error_body, error_to_json
from engine.server.metrics import EngineCollector
from engine.server.openai import CompletionCall, build_response, stream_response
from engine.server.schema import AbortBody, CompletionBody, ReleaseBody, ScoreBody, TokenizeBody
from engine.speculation.load import FORMS, MAX_LENGTH, SHIPPED
from engine.threads.processors import choose_threads

MAX_BODY_BYTES = 32 << 20

_SHUTDOWN_SECONDS = 2
_INTERRUPTED = 128 + signal.SIGINT
_DEFAULTS = CoreOptions()
_T = TypeVar("_T")


def create_app(engine: LocalEngine) -> FastAPI:
    """The application around an engine, which it closes when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(title="Reasoner engine", lifespan=lifespan)
    app.add_middleware(_BodyLimit)
    app.add_exception_handler(EngineError, _engine_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, http: Request) -> Response:
        prompts = [
            await engine.tokenize_prompt(body.model, prompt) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompts
        ]
        asked = CompletionCall(body, body.to_requests(prompts), engine.tokenizer(body.model))
        events = await _started(engine, asked)
        if body.stream or body.stream_choices:
            return StreamingResponse(stream_response(asked, events), media_type="text/event-stream")
        return JSONResponse(await _while_connected(http, build_response(asked, events)))

    @app.post("/v1/score", response_model=None)
    async def score(body: ScoreBody, http: Request) -> Response:
        results = await _while_connected(http, engine.score(body.to_request()))
        return JSONResponse({"model": body.model, "results": [asdict(result) for result in results]})

    @app.post("/v1/abort")
    async def abort(body: AbortBody) -> dict[str, str]:
        await engine.abort(body.request_id)
        return {"request_id": body.request_id}

    @app.post("/v1/leases/release")
    async def release(body: ReleaseBody) -> dict[str, str]:
        await engine.release(body.lease, body.tokens)
        return {"lease": body.lease}

    @app.post("/v1/cache/clear")
    async def clear_cache() -> dict[str, str]:
        await engine.clear_cache()
        return {"status": "cleared"}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, object]:
        text = body.prompt if body.prompt is not None else body.messages or []
        tokens = await engine.tokenize(
            body.model, text, special=body.add_special_tokens, generation_prompt=body.add_generation_prompt
        )
        return {"tokens": tokens, "count": len(tokens)}

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        fixed = {"object": "model", "created": 0, "owned_by": "reasoner"}
        return {"object": "list", "data": [fixed | asdict(info) for info in await engine.models()]}

    @app.get("/healthz")
    async def healthz() -> Response:
        if engine.is_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": f"the engine has stopped: {engine.failure or 'it was closed'}"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a server until a signal ends it.

    Exit status 130 after Ctrl-C, 2 when the arguments or a model folder are wrong, 1 when memory does not hold what
    they ask for, and when the engine stopped by itself.
    """
    arguments = _parser().parse_args(argv)
    threads = choose_threads(arguments.threads)
    torch.set_num_threads(threads.number)
    try:
        engine = LocalEngine(_named_folders(arguments.model), _options(arguments))
    except EngineError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        why = "there is not enough memory for the models and their --kv-tokens and --max-running"
        print(f"engine: {why}: {error}", file=sys.stderr)
        return 1
    print(f"engine: {threads}", flush=True)
    app = create_app(engine)
    # What loading made stays. To look through it for garbage stopped all steps for a sixth of a second now and then.
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        uds=arguments.uds,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    server = _Server(config, engine)
    try:
        server.run()
    finally:
        if arguments.uds:
            Path(arguments.uds).unlink(missing_ok=True)
    if engine.failure is not None:
        print(f"engine: it stopped: {engine.failure}", file=sys.stderr)
        return 1
    return _INTERRUPTED if server.interrupted else 0


class _Server(uvicorn.Server):
    """Says when it is ready, and ends in order: on the first signal instead of dying by it, and with its engine.

    A server without its engine would refuse every request for as long as it runs; one that ends is started again.
    """

    def __init__(self, config: uvicorn.Config, engine: LocalEngine) -> None:
        super().__init__(config)
        self._engine = engine
        self.interrupted = False

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            where = self.config.uds
            if where is None:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                where = f"http://{host}:{port}"
            print(f"engine ready on {where}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self._engine.is_alive

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        await self._engine.close()  # before the wait for answers under way, so that they end with an error at once
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        def leave(number: int, _: FrameType | None) -> None:
            self.interrupted = self.interrupted or number == signal.SIGINT
            self.should_exit = True  # however often: uvicorn would take a second Ctrl-C for a wish to leave untidily

        previous = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _BodyLimit:
    """Refuses a body over the limit with 413, by its announced length or when it grows past it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
            await _too_large()(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, limited, send)


async def _started(engine: LocalEngine, asked: CompletionCall) -> Events:
    """The events of all prompts. Refusals are raised here, while they can still become a status code."""
    streams: list[Events] = []
    for request in asked.requests:
        try:
            streams.append(engine.generate(request, stream=asked.body.stream))
        except EngineError:
            await engine.abort(request.request_id)  # the prompts before it
            raise
    return merge_streams(streams, asked.body.width)


async def _while_connected(http: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled when the client goes away first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client closed the connection")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _too_large() -> JSONResponse:
    body = error_body(f"the body has more than {MAX_BODY_BYTES} bytes", "invalid_request_error", None, "too_large")
    return JSONResponse(body, 413)


async def _engine_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, EngineError):
        raise error
    status, body = error_to_json(error)
    return JSONResponse(body, status, {"Retry-After": "1"} if status in (429, 503) else None)


async def _validation_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    fields, messages = [], []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"] if part != "body"]
        if problem["type"] == "json_invalid":
            messages.append(f"the body is not valid JSON ({problem['ctx']['error']})")
            continue
        fields.extend(place[:1])
        unknown = problem["type"] == "extra_forbidden"
        message = "there is no such field" if unknown else problem["msg"].removeprefix("Value error, ")
        messages.append(f"{'.'.join(place) or 'body'}: {message}")
    body = error_body("; ".join(messages[:4]), "invalid_request_error", fields[0] if fields else None, "invalid_value")
    return JSONResponse(body, 400)


async def _http_error(http: Request, error: Exception) -> Response:
    if not isinstance(error, StarletteHTTPException):
        raise error
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(error_body(message, "invalid_request_error", None, "http_error"), error.status_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.server.app", description=__doc__)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH", help="a model to serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 takes a free one")
    parser.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    sizes = (
        ("kv_tokens", "tokens of keys and values kept per model (default: what 1 GiB holds, at most 131072)"),
        ("max_running", "sequences of a model that run at once (default: %(default)s)"),
        ("max_waiting", "sequences that may wait before requests are refused (default: %(default)s)"),
        ("step_tokens", "tokens computed in one step at most (default: %(default)s)"),
        ("page_size", "tokens of a page of keys and values (default: %(default)s)"),
    )
    for name, text in sizes:
        default = getattr(_DEFAULTS, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive, default=default, metavar="N", help=text)
    parser.add_argument(
        "--lease-share",
        type=_share,
        default=_DEFAULTS.lease_share,
        metavar="X",
        help="part of the kept tokens that leases may pin (default: %(default)s)",
    )
    parser.add_argument(
        "--lease-seconds",
        type=_seconds,
        default=_DEFAULTS.lease_seconds,
        metavar="S",
        help="a lease that no request names for so long ends (default: %(default)s)",
    )
    parser.add_argument(
        "--draft",
        default="auto",
        metavar="DRAFTER",
        help=f"who guesses tokens, which never changes a result: {FORMS} (default: %(default)s, what ships in the "
        f"model's folder {SHIPPED!r}, else ngram)",
    )
    parser.add_argument(
        "--draft-length",
        type=_positive,
        default=_DEFAULTS.draft_length,
        metavar="N",
        help=f"most guesses after each other, at most {MAX_LENGTH} (default: %(default)s)",
    )
    for name, known, text in (
        ("device", DEVICES, "where models are computed; auto takes a GPU if there is one"),
        ("dtype", DTYPES, "of weights, keys and values; auto is bfloat16 on a GPU, and float32 on a CPU"),
        ("kv_dtype", KV_DTYPES, "of keys and values; 8 bits keep two to four times as many tokens; auto is the dtype"),
    ):
        option, default = f"--{name.replace('_', '-')}", getattr(_DEFAULTS, name)
        parser.add_argument(option, choices=known, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="threads for the arithmetic of one step")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="a request's numbers are the same bits whatever else runs or is cached; slower",
    )
    parser.add_argument("--debug", action="store_true", help="check all invariants when idle; stop if one is broken")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} must be between 0 and 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} must be more than 0 seconds")
    return value


def _options(arguments: argparse.Namespace) -> CoreOptions:
    return CoreOptions(**{option.name: getattr(arguments, option.name) for option in fields(CoreOptions)})


def _named_folders(models: Sequence[str]) -> dict[str, str]:
    folders: dict[str, str] = {}
    for model in models:
        name, equals, path = model.partition("=")
        if not (name and equals and path):
            raise EngineError(f"--model {model!r} must be NAME=PATH, such as policy=models/policy")
        if name in folders:
            raise EngineError(f"--model {name}=… is given twice")
        folders[name] = path
    return folders


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while the models are loaded
        sys.exit(_INTERRUPTED)
