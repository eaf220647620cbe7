"""The HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware

from api.app import openapi
from api.http import problems
from api.http.authentication import Authenticate
from api.http.limits import LimitCallers
from api.http.middleware import LimitBody, Observe
from api.http.model_catalog import Catalog
from api.http.query_parameters import known_query
from api.http.readiness import Readiness
from api.http.security_headers import Harden
from api.http.state import State
from api.openai.chat import routes as chat_routes
from api.openai.errors import OpenAIErrors
from api.openai.responses import routes as responses_routes
from api.routes import batches, export, jobs, keys, pages, service
from engine.client.health import Health
from engine.protocol.types import EngineClient
from workers.broker.embedded import broker_url
from workers.broker.reaper import Reaper
from workers.broker.wakeups import make_celery
from workers.config.reload import LiveSettings
from workers.config.settings import Settings
from workers.engines.connect import connect
from workers.engines.watch import EngineWatch
from workers.store.jobs import JobStore
from workers.telemetry.tracing import flush_traces


def create_app(settings: Settings, engine: EngineClient | None = None) -> FastAPI:
    """Needs neither broker nor engine to start: while one is away, answers say so.

    ``engine`` is for tests; without it the configured one is used.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = JobStore(broker_url(settings))
        health = Health()
        client = engine or connect(settings, health=health, current=True)
        reaper = Reaper(
            store,
            make_celery(settings),
            max_attempts=settings.max_attempts,
            retention=settings.retention_seconds,
        )
        catalog = Catalog(client, health)
        app.state.service = State(LiveSettings(settings), store, catalog, reaper, Readiness(client, catalog))
        reaping = asyncio.create_task(reaper.run())
        watching = asyncio.create_task(EngineWatch(store, catalog.answers, reaper.nudge).run())
        try:
            yield
        finally:
            watching.cancel()
            reaper.stop()
            await asyncio.wait({watching, reaping})
            await client.close()
            await store.close()
            flush_traces()  # the server's last act is to die by the signal that it was sent

    app = FastAPI(
        title="Reasoner",
        summary="Turns a hard question and a compute budget into the best answer that the budget can buy.",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # to where: behind a proxy that ends TLS, http:// would carry the key in the open
        lifespan=lifespan,
        middleware=[
            Middleware(Harden),
            Middleware(OpenAIErrors),
            Middleware(Observe),
            Middleware(Authenticate, settings=settings),
            Middleware(LimitCallers),
            Middleware(LimitBody, settings=settings),
        ],
    )
    problems.install(app)
    openapi.install(app)
    strict = [Depends(known_query)]
    app.include_router(export.router, dependencies=strict)  # before the one that takes any word for an id
    app.include_router(jobs.router, dependencies=strict)
    app.include_router(batches.router, dependencies=strict)
    app.include_router(keys.router, dependencies=strict)
    app.include_router(chat_routes.router)
    app.include_router(responses_routes.router)
    app.include_router(service.router)
    app.include_router(pages.router)
    return app
