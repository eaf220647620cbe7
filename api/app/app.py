"""The HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from api.anthropic import routes as messages_routes
from api.anthropic.errors import ANTHROPIC_ERRORS, AnthropicHeadersMiddleware
from api.app.openapi import extend_openapi
from api.batches.feeder import BatchFeeder
from api.conversation.error_format import ErrorFormatMiddleware
from api.http.authentication import AuthenticationMiddleware
from api.http.limits import RateLimitMiddleware
from api.http.middleware import (
    BodyLimitMiddleware,
    ContentEncodingMiddleware,
    RequestLogMiddleware,
    SecurityHeadersMiddleware,
    SubPathMiddleware,
)
from api.http.model_catalog import ModelCatalog
from api.http.problems import install_error_handlers
from api.http.readiness import Readiness
from api.http.state import ServiceState
from api.mcp.endpoint import McpEndpoint
from api.mcp.errors import MCP_ERRORS
from api.mcp.errors import PATH as MCP_PATH
from api.openai.chat import routes as chat_routes
from api.openai.errors import OPENAI_ERRORS
from api.openai.responses import routes as responses_routes
from api.routes import batches, export, files, jobs, keys, message_batches, pages, selections, service, usage
from engine.protocol.types import EngineClient
from engine.remote.health import Health
from workers.broker.archiver import Archiver
from workers.broker.embedded import broker_url
from workers.broker.reaper import Reaper
from workers.broker.wakeups import make_celery, make_templates
from workers.config.reload import LiveSettings
from workers.config.settings import Settings
from workers.engines.connect import connect
from workers.engines.watch import EngineWatch
from workers.store.files import FileStore
from workers.store.jobs import JobStore
from workers.telemetry.tracing import captures_content, flush_traces, make_exporter, make_resource

log = structlog.get_logger("reasoner.api")


def create_app(settings: Settings, engine: EngineClient | None = None) -> FastAPI:
    """Return the application. It starts without broker and engine: requests that need them get a 503 meanwhile.

    ``engine`` replaces the configured one in tests.
    """
    mcp = McpEndpoint(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store, archiver = _open_store(settings)
        files = FileStore(store, settings.files_folder)
        health = Health()
        client = engine or connect(settings, health=health, reports_health=True)
        live = LiveSettings(settings)
        reaper = Reaper(
            store,
            files,
            make_templates(make_celery(settings)),
            max_attempts=settings.max_attempts,
            retention=settings.retention_seconds,
            get_shares=lambda: live.now.limits.shares,
        )
        catalog = ModelCatalog(client, health)
        app.state.service = ServiceState(
            live, store, files=files, catalog=catalog, archiver=archiver, readiness=Readiness(client, catalog)
        )
        feeder = BatchFeeder(app.state.service)
        reaping = asyncio.create_task(reaper.run())
        feeding = asyncio.create_task(feeder.run())
        watching = asyncio.create_task(EngineWatch(store, catalog.is_engine_available).run())
        try:
            async with _run_archiver(archiver), _export_spans(settings, store):
                yield
        finally:
            watching.cancel()
            feeder.stop()
            reaper.stop()
            await mcp.stop()
            await asyncio.wait({watching, reaping, feeding})
            await client.close()
            await store.close()
            flush_traces()  # here, since uvicorn ends the process by the signal that it received

    app = FastAPI(
        title="Reasoner",
        summary="Turns a hard question and a compute budget into the best answer that the budget can buy.",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # behind a proxy that ends TLS it would redirect to http://, and send the key in clear
        lifespan=lifespan,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        middleware=_list_middleware(settings),
    )
    install_error_handlers(app)
    extend_openapi(app)
    _add_routes(app, mcp)
    return app


def _add_routes(app: FastAPI, mcp: McpEndpoint) -> None:
    # The export is before /v1/jobs/{job_id}, which matches it too.
    for routes in (
        *(export, jobs, selections, batches, files, keys),
        *(chat_routes, responses_routes, messages_routes, message_batches, service, usage, pages),
    ):
        # An included router builds all of its routes again at its first request, for a third of a second.
        app.router.routes.extend(routes.router.routes)
    app.router.routes.append(Route(MCP_PATH, mcp, include_in_schema=False))


def _open_store(settings: Settings) -> tuple[JobStore, Archiver | None]:
    """Return the jobs, and what moves them to the archive; without one, no database library is imported."""
    if settings.archive_address is None:
        log.info("no archive: ended jobs stay in the broker's memory until they are deleted (set archive_url)")
        return JobStore(broker_url(settings)), None
    from workers.archive.archive import Archive

    archive = Archive(settings.archive_address)
    store = JobStore(broker_url(settings), archive=archive)
    return store, Archiver(store, archive, age=settings.archive_after, retention=settings.retention_seconds)


@contextlib.asynccontextmanager
async def _run_archiver(archiver: Archiver | None) -> AsyncIterator[None]:
    """Move jobs to the archive meanwhile, if there is one."""
    if archiver is None:
        yield
        return
    running = asyncio.create_task(archiver.run())
    try:
        yield
    finally:
        archiver.stop()
        await asyncio.wait({running})


@contextlib.asynccontextmanager
async def _export_spans(settings: Settings, store: JobStore) -> AsyncIterator[None]:
    """Export the spans of jobs that end, if a collector is configured; else nothing of OpenTelemetry is imported."""
    if settings.otlp_url is None:
        yield
        return
    from workers.telemetry.span_export import SpanExport

    exporter, resource = make_exporter(settings.otlp_url), make_resource("api")
    export = SpanExport(store, exporter, resource, with_content=captures_content())
    running = asyncio.create_task(export.run())
    try:
        yield
    finally:
        await export.stop(running)


def _list_middleware(settings: Settings) -> list[Middleware]:
    """Return the middleware, outermost first."""
    return [
        *_allow_origins(settings),
        Middleware(SubPathMiddleware, root_path=settings.root_path),
        Middleware(SecurityHeadersMiddleware),
        Middleware(AnthropicHeadersMiddleware),
        Middleware(ErrorFormatMiddleware, formats=[ANTHROPIC_ERRORS, OPENAI_ERRORS, MCP_ERRORS]),
        Middleware(RequestLogMiddleware),
        Middleware(AuthenticationMiddleware, settings=settings),
        Middleware(RateLimitMiddleware),
        Middleware(ContentEncodingMiddleware),
        Middleware(BodyLimitMiddleware, settings=settings),
    ]


def _allow_origins(settings: Settings) -> list[Middleware]:
    """Return the middleware that lets pages of the configured origins call the API; none without any."""
    if not settings.cors_origins:
        return []
    exposed = (
        *("Location", "Retry-After", "RateLimit", "RateLimit-Policy"),
        *("X-Request-ID", "Request-Id", "Idempotency-Replayed"),
    )
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=exposed,
        )
    ]
