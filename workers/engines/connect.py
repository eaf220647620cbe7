"""One client for all engines that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr

from engine.protocol.types import EngineClient
from engine.remote.chat.options import ChatOptions
from engine.remote.connection import SILENCE_SECONDS
from engine.remote.health import Health
from engine.remote.http import HttpEngine
from engine.remote.http_clients import HttpClients
from engine.remote.replicas import ReplicatedEngine
from engine.remote.router import KnownProperties, RoutedEngine
from engine.remote.throttle import LocalThrottle, Throttle
from engine.remote.urls import hide_login
from prm.formats.registry import FORMAT_NOTE
from workers.config.settings import Settings
from workers.store.redis_client import RedisClient
from workers.store.shared_throttle import SharedThrottle


def connect(
    settings: Settings,
    urls: Sequence[str] = (),
    *,
    health: Health | None = None,
    reports_health: bool = False,
    redis: RedisClient | None = None,
    clients: HttpClients | None = None,
) -> EngineClient:
    """Return a client of the engines at ``urls`` (by default the configured ones) and of those of the verifier.

    Does not connect yet. ``health`` and ``reports_health``: as for ``ReplicatedEngine``.
    ``redis``: shares the limits of servers with the other workers; without it they hold for this client alone.
    ``clients``: shares their open connections, and stays open.
    """
    health = health or Health()
    main: EngineClient | None = None
    overrides: dict[str, EngineClient] = {}
    for endpoint in list_endpoints(settings, urls, redis=redis):
        client = _connect_replicas(endpoint, health, reports_health, clients)
        if endpoint.models:
            overrides |= dict.fromkeys(endpoint.models, client)
        else:
            main = client
    main = main or next(iter(overrides.values()))
    prm = settings.prm_name
    known: dict[str, KnownProperties] = {
        name: KnownProperties(_format_note(profile.prm_format), profile.parameters)
        for name, profile in settings.models.items()
        if profile.prm_format is not None or profile.parameters is not None
    }
    if prm is not None and settings.prm_format is not None:
        known[prm] = replace(known.get(prm, KnownProperties()), extra=_format_note(settings.prm_format))
    return RoutedEngine(main, overrides, known) if overrides or known else main


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Interchangeable servers. The fields are those of ``HttpEngine``."""

    models: Sequence[str]
    """The names of its models; none for the endpoint of all that have no other."""
    urls: Sequence[str]
    api_key: SecretStr | None
    tokenizer: Path | None
    kind: str | None = None
    chat: ChatOptions | None = None
    throttle: Throttle | None = None
    silence_seconds: float = SILENCE_SECONDS
    obeys_priorities: bool = False

    @property
    def key(self) -> str | None:
        """The secret to send."""
        return None if self.api_key is None else self.api_key.get_secret_value()


def list_endpoints(settings: Settings, urls: Sequence[str] = (), *, redis: RedisClient | None = None) -> list[Endpoint]:
    """Return where engines are, later ones taking precedence: the one of all models, of single ones, of profiles."""
    endpoints = []
    if addresses := urls or settings.engine_addresses:
        endpoints.append(Endpoint((), addresses, settings.engine_api_key, settings.engine_tokenizer))
    endpoints += [
        Endpoint((name,), profile.url, profile.read_api_key(), profile.tokenizer)
        for name, profile in settings.models.items()
        if profile.url
    ]
    if settings.prm_name is not None and settings.prm_url:
        endpoints.append(Endpoint((settings.prm_name,), settings.prm_url, settings.prm_api_key, settings.prm_tokenizer))
    for name, engine in settings.engines.items():
        limits = engine.limits
        throttle = LocalThrottle(limits) if redis is None else SharedThrottle(redis, name, limits)
        key = engine.read_api_key()
        endpoint = Endpoint(
            engine.models,
            engine.url,
            api_key=key,
            tokenizer=engine.tokenizer,
            kind=engine.kind,
            chat=engine.chat,
            throttle=throttle,
        )
        endpoints.append(
            replace(endpoint, silence_seconds=engine.silence_seconds, obeys_priorities=engine.obeys_priorities)
        )
    return endpoints


def _format_note(format_name: str | None) -> dict[str, object]:
    return {} if format_name is None else {FORMAT_NOTE: format_name}


def _connect_replicas(
    endpoint: Endpoint, health: Health, reports_health: bool, clients: HttpClients | None
) -> ReplicatedEngine:
    is_single = len(endpoint.urls) == 1  # no replica can take over
    engines = {
        hide_login(url): HttpEngine(
            url,
            api_key=endpoint.key,
            tokenizer=endpoint.tokenizer,
            dialect=endpoint.kind,
            chat=endpoint.chat,
            should_wait=is_single,
            throttle=endpoint.throttle,
            kinds=health.kinds,
            silence_seconds=endpoint.silence_seconds,
            obeys_priorities=endpoint.obeys_priorities,
            clients=clients,
        )
        for url in endpoint.urls
    }
    return ReplicatedEngine(engines, health, reports_health=reports_health)
