"""The objects that all routes of one application share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from api.http.model_catalog import ModelCatalog
from api.http.readiness import Readiness
from workers.broker.archiver import Archiver
from workers.config.reload import LiveSettings
from workers.config.settings import Settings
from workers.store.files import FileStore
from workers.store.jobs import JobStore


@dataclass(frozen=True, slots=True)
class ServiceState:
    live: LiveSettings
    store: JobStore
    files: FileStore
    catalog: ModelCatalog
    archiver: Archiver | None
    """``None`` if the service has no archive."""
    readiness: Readiness
    started_at: float = field(default_factory=time.time)

    @property
    def settings(self) -> Settings:
        """The settings as they are now: some can change while the service runs."""
        return self.live.now


async def get_state(request: Request) -> ServiceState:
    state: ServiceState = request.app.state.service
    return state


State = Annotated[ServiceState, Depends(get_state)]
"""Parameter of a route that needs the shared objects."""
