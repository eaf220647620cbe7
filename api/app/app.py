"""The HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI
from starlette.middleware import Middleware

from api import (
    openapi,
    problems,
    routes_batches,
    routes_export,
    routes_jobs,
    routes_keys,
    routes_pages,
    routes_service,
)
from api.authentication import Authenticate
from api.catalog import Catalog
from api.known_query import known_query
from api.limits import LimitCallers
from api.middleware import LimitBody, Observe
from api.openai import routes_chat, routes_responses
from api.openai.errors import OpenAIErrors
from api.readiness import Readiness
from api.security_headers import Harden
from api.state import State
from engine.health import Health
from engine.types import EngineClient
from workers.embedded import broker_url
from workers.engine_watch import EngineWatch
from workers.engines import connect
from workers.live import LiveSettings
from workers.messages import make_celery
from workers.reaper import Reaper
from workers.settings import Settings
from workers.store import JobStore
from workers.tracing import flush_traces


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
    app.include_router(routes_export.router, dependencies=strict)  # before the one that takes any word for an id
    app.include_router(routes_jobs.router, dependencies=strict)
    app.include_router(routes_batches.router, dependencies=strict)
    app.include_router(routes_keys.router, dependencies=strict)
    app.include_router(routes_chat.router)
    app.include_router(routes_responses.router)
    app.include_router(routes_service.router)
    app.include_router(routes_pages.router)
    return app
