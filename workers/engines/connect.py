"""The engines that the configuration names, as one client. No address comes from anywhere else."""

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
    """A client of the engines at ``urls``, by default the configured ones, and of the verifier's own if it has some.

    Does not connect yet. ``health`` is what this process knows of them, ``reports_health`` as for ``ReplicatedEngine``.
    """
    health = health or Health()
    main = _fleet(urls or settings.engine_addresses, settings.engine_tokenizer, health, reports_health)
    elsewhere, notes = {}, {}
    prm = settings.prm_name
    if prm is not None and settings.prm_url:
        elsewhere[prm] = _fleet(settings.prm_url, settings.prm_tokenizer, health, reports_health)
    if prm is not None and settings.prm_format is not None:
        notes[prm] = {FORMAT_NOTE: settings.prm_format}
    return RoutedEngine(main, elsewhere, notes) if elsewhere or notes else main


def engine_name(url: str) -> str:
    """An engine's address as it may be shown: without a password."""
    login, at, _ = urlsplit(url).netloc.rpartition("@")
    return url.replace(login + at, "", 1)


def _fleet(urls: Sequence[str], tokenizer: Path | None, health: Health, reports_health: bool) -> ReplicatedEngine:
    alone = len(urls) == 1  # nobody can stand in for it: wait for it
    engines = {engine_name(url): HttpEngine(url, tokenizer=tokenizer, patient=alone) for url in urls}
    return ReplicatedEngine(engines, health, reports_health=reports_health)
