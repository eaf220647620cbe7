"""The reference pages, from the code."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest

from api.app.app import create_app
from api.cli.entry.app import app as cli
from api.http.metrics import render_metrics
from docs.generate import clients, command_line, defaults, events, http, metrics, models, servers, settings
from engine.server.app import create_app as create_engine_app
from engine.server.metrics import EngineCollector
from reasoner.admission.effort import Effort
from reasoner.admission.names import Name
from reasoner.admission.sources import SOURCES
from reasoner.budget.prices import Prices
from reasoner.jobs.events import DATA
from reasoner.jobs.verifier_specs import verifier_kinds
from reasoner.strategies.registry import STRATEGIES, describe_strategies
from tests.clients.report import read_rows
from workers.archive.filters import DEAD
from workers.config.model_profiles import ModelProfile
from workers.config.rate_limits import Limits
from workers.config.settings import RELOADABLE, Settings

NESTED = {
    "[models.NAME]": ModelProfile,
    "[models.NAME.prices]": Prices,
    "[effort.NAME]": Effort,
    "[names.NAME]": Name,
    "[limits]": Limits,
}


class _IdleEngine:
    """Stand-in for an engine that serves no model: each of its methods returns an empty mapping."""

    def __getattr__(self, name: str) -> Any:
        return dict


def create_pages() -> dict[str, str]:
    """Return the generated pages of ``docs/reference`` by file name."""
    return {
        "http.md": http.page(
            "HTTP API",
            "A running service has this page with a form for each call at `/docs`, and the OpenAPI document at "
            "`/openapi.json`. Errors are problem details (RFC 9457); on OpenAI's routes they have OpenAI's form.\n",
            create_app(Settings.model_construct()).openapi(),
        ),
        "engine.md": http.page(
            "Engine API",
            "Routes of `reasoner engine`. It asks for no keys: keep it on loopback or on a Unix socket.\n",
            create_engine_app(cast(Any, _IdleEngine())).openapi(),
        ),
        "cli.md": command_line.page(cli),
        "settings.md": settings.page(Settings, cast(Any, NESTED), RELOADABLE),
        "metrics.md": _metrics(),
        "events.md": events.page(DATA),
        "defaults.md": defaults.page(SOURCES),
        "servers.md": servers.page(STRATEGIES),
        "clients.md": clients.page(read_rows()),
        "strategies.md": models.strategies(describe_strategies()),
        "verifiers.md": models.verifiers(verifier_kinds()),
    }


def _metrics() -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(cast(Any, _IdleEngine())))
    service = render_metrics(
        {"queued": 0, DEAD: 0}, {}, engines=[], queues={}, queue_cap=0, memory=(0, 0), archive_up=True
    )
    return "\n".join(
        [
            "# Metrics\n",
            "`GET /metrics` of the API and of each engine is in Prometheus' text format. Numbers about jobs are read "
            "from the store and are the same in every API process; those about HTTP and engines belong to the process "
            "that is scraped.\n",
            metrics.section("API", service.decode()),
            metrics.section("Engine", generate_latest(registry).decode()),
        ]
    )
