"""One client for all engines that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from engine.client.health import Health
from engine.client.http import HttpEngine
from engine.client.replicas import ReplicatedEngine
from engine.client.router import RoutedEngine
from engine.protocol.types import EngineClient
from prm.formats.registry import FORMAT_NOTE
from workers.config.settings import Settings


def connect(
    settings: Settings, urls: Sequence[str] = (), *, health: Health | None = None, reports_health: bool = False
) -> EngineClient:
    """Return a client of the engines at ``urls`` (by default the configured ones) and of those of the verifier.

    Does not connect yet. ``health`` and ``reports_health``: as for ``ReplicatedEngine``.
    """
    health = health or Health()
    main = _connect_replicas(urls or settings.engine_addresses, settings.engine_tokenizer, health, reports_health)
    places = {name: (profile.url, profile.tokenizer) for name, profile in settings.models.items() if profile.url}
    formats = {name: profile.prm_format for name, profile in settings.models.items()}
    prm = settings.prm_name
    if prm is not None and settings.prm_url:
        places[prm] = settings.prm_url, settings.prm_tokenizer
    if prm is not None and settings.prm_format is not None:
        formats[prm] = settings.prm_format
    overrides = {name: _connect_replicas(*place, health, reports_health) for name, place in places.items()}
    extras = {name: {FORMAT_NOTE: form} for name, form in formats.items() if form is not None}
    return RoutedEngine(main, overrides, extras) if overrides or extras else main


def engine_name(url: str) -> str:
    """Return an engine's address without its password, for logs and metrics."""
    login, at, _ = urlsplit(url).netloc.rpartition("@")
    return url.replace(login + at, "", 1)


def _connect_replicas(
    urls: Sequence[str], tokenizer: Path | None, health: Health, reports_health: bool
) -> ReplicatedEngine:
    is_single = len(urls) == 1  # no replica can take over
    engines = {engine_name(url): HttpEngine(url, tokenizer=tokenizer, should_wait=is_single) for url in urls}
    return ReplicatedEngine(engines, health, reports_health=reports_health)
