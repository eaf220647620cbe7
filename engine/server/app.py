"""The engine server as a program."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # traversing the imported modules, which stay alive, took a fifth of the start

import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from engine.threads import short_waits  # noqa: F401 - it has to come before torch

# isort: split
import torch
import uvicorn
from fastapi import FastAPI

from engine.core.gpu_memory import NotEnoughMemory
from engine.core.local_engine import LocalEngine
from engine.protocol.types import EngineError
from engine.server.body_limit import BodyLimit
from engine.server.command_line import (
    build_parser,
    read_adapter_folders,
    read_model_folders,
    read_options,
    read_templates,
)
from engine.server.errors import add_error_handlers
from engine.server.routes import build_router
from engine.threads.processors import choose_threads

_SHUTDOWN_SECONDS = 2
_INTERRUPTED = 128 + signal.SIGINT


def create_app(engine: LocalEngine) -> FastAPI:
    """Return the application of an engine, which it closes at its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = FastAPI(title="Reasoner engine", lifespan=lifespan)
    app.add_middleware(BodyLimit)
    add_error_handlers(app)
    app.include_router(build_router(engine))
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server until a signal ends it.

    Exit status: 130 after Ctrl-C; 2 for wrong arguments or a wrong model folder; 1 if memory does not suffice, or if
    the engine stopped by itself.
    """
    arguments = build_parser().parse_args(argv)
    threads = choose_threads(arguments.threads)
    torch.set_num_threads(threads.number)
    try:
        folders = read_model_folders(arguments.model)
        templates = read_templates(arguments.chat_template, folders)
        adapters = read_adapter_folders(arguments.adapter)
        engine = LocalEngine(folders, read_options(arguments), templates, adapters)
    except EngineError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1 if isinstance(error, NotEnoughMemory) else 2
    print(f"engine: {threads}", flush=True)
    app = create_app(engine)
    # What was loaded stays alive: traversing it in a collection stopped all steps for up to a sixth of a second.
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
    """Print a line when ready, and shut down in order on the first signal or when the engine stops.

    A server whose engine has stopped would refuse every request; one that ends is started again.
    """

    def __init__(self, config: uvicorn.Config, engine: LocalEngine) -> None:
        super().__init__(config)
        self._engine = engine
        self.interrupted = False

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            address = self.config.uds
            if address is None:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                address = f"http://{host}:{port}"
            print(f"engine ready on {address}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self._engine.is_alive

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        await self._engine.close()  # first, so that requests in flight end with an error at once
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        def handle(number: int, _: FrameType | None) -> None:
            self.interrupted = self.interrupted or number == signal.SIGINT
            self.should_exit = True  # uvicorn would skip the shutdown at a second Ctrl-C

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # while the models are loaded
        sys.exit(_INTERRUPTED)
