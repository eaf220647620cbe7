"""The roles as processes: single ones, or all of them on this machine under one supervisor."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # traversing the imported modules, which stay alive, took a seventh of the start

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import structlog
import uvicorn
from fastapi import FastAPI

from api.app.app import create_app
from api.roles.plugin_report import describe_plugins, describe_unusable
from api.roles.supervisor import Supervisor, check_bind, check_port, engine_command
from workers.broker.embedded import EmbeddedBroker
from workers.config.model_folders import check_models
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError
from workers.config.unknown_variables import describe_unknown_variables
from workers.execution.tasks import make_worker
from workers.execution.tasks import serve as serve_worker
from workers.processes.files import AcceptErrorHandler, raise_file_limit
from workers.processes.shutdown import interruptible
from workers.telemetry.logs import configure_logging
from workers.telemetry.tracing import start_tracing

GRACEFUL_SECONDS = 3
LOOK_SECONDS = 0.5

log = structlog.get_logger("reasoner.start")


def run_api(settings: Settings) -> None:
    """Serve HTTP until SIGTERM or Ctrl-C."""
    raise_file_limit()
    check_port(settings.host, settings.port)
    configure_logging()
    _log_start()
    start_tracing(settings, "api")
    with _run_broker(settings):
        check_bind(settings)
        app = create_app(settings)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_seconds,
            timeout_graceful_shutdown=GRACEFUL_SECONDS,
        )
        server = Server(config, app)
        server.run()
        if not server.started:
            sys.exit(1)


class Server(uvicorn.Server):
    """Server that announces its shutdown to the application before waiting for calls in flight."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptErrorHandler())
        await super().startup(sockets)
        gc.freeze()  # routes and schemas stay alive: a collection amid a request traversed them for a tenth of a second

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.service.store.end_waits()
        await super().shutdown(sockets)


BATCH_NICENESS = 10
"""The niceness of a worker of the batch queue alone: on shared cores it yields to whoever answers interactive requests.
"""


def run_worker(settings: Settings) -> None:
    """Run jobs until SIGTERM or Ctrl-C, then hand back those in progress."""
    raise_file_limit()
    with _run_broker(settings):
        if settings.queues == ("batch",):
            os.nice(BATCH_NICENESS)
        _log_start()
        start_tracing(settings, "worker")
        serve_worker(make_worker(settings), settings.queues)


def run_engine(settings: Settings) -> None:
    """Replace this process, which has no torch, by the engine server."""
    raise_file_limit()
    if len(settings.engine_addresses) > 1:
        raise ConfigError("REASONER_ENGINE_URL names several engines: give the address of this one alone")
    if not settings.engine_addresses:
        raise ConfigError("all models have servers of their own, so that there is none for an engine here")
    check_models(settings)
    address = urlsplit(settings.engine_addresses[0])
    if address.scheme == "unix":
        where = ["--uds", address.path]
    elif address.scheme == "http" and address.hostname and address.port:
        check_port(address.hostname, address.port)
        where = ["--host", address.hostname, "--port", str(address.port)]
    else:
        raise ConfigError(
            f"REASONER_ENGINE_URL: an engine cannot listen on {settings.engine_addresses[0]!r}; "
            "give http://HOST:PORT or unix:///PATH"
        )
    for line in describe_unknown_variables():
        _report(line)
    command = engine_command(settings, where)
    os.execv(command[0], command)


def serve(settings: Settings) -> None:
    """Run all roles on this machine until SIGTERM or Ctrl-C."""
    raise_file_limit()
    for line in (*describe_plugins(), *describe_unusable(), *describe_unknown_variables()):
        _report(line)
    with Supervisor(settings, log_dir=settings.data_dir / "logs", on_progress=_report):
        while True:  # not a single unlimited wait: a signal that arrives just before it is handled when it ends
            time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def _run_broker(settings: Settings) -> Iterator[None]:
    if settings.redis_url is not None:
        yield
        return
    with EmbeddedBroker(settings.data_dir):
        yield


def _log_start() -> None:
    for line in describe_plugins():
        log.info(line)
    for line in (*describe_unusable(), *describe_unknown_variables()):
        log.warning(line)


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main(role: str) -> None:
    """Entry point of the supervisor's child processes, configured by the environment alone."""
    gc.freeze()
    gc.enable()
    try:
        with interruptible():
            {"api": run_api, "worker": run_worker}[role](load_settings())
    except ConfigError as error:
        sys.exit(f"reasoner: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
