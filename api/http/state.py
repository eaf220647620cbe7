"""What the routes of one application share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from api.http.model_catalog import Catalog
from api.http.readiness import Readiness
from workers.broker.reaper import Reaper
from workers.config.reload import LiveSettings
from workers.config.settings import Settings
from workers.store.jobs import JobStore


@dataclass(frozen=True, slots=True)
class State:
    live: LiveSettings
    store: JobStore
    catalog: Catalog
    reaper: Reaper
    readiness: Readiness
    started_at: float = field(default_factory=time.time)

    @property
    def settings(self) -> Settings:
        """As they are now."""
        return self.live.now


def service(request: Request) -> State:
    state: State = request.app.state.service
    return state
