"""The engines that the configuration names, as one client. No address comes from anywhere else."""

from __future__ import annotations

from engine.client import HttpEngine
from engine.routed import RoutedEngine
from engine.types import EngineClient
from workers.settings import Settings


def connect(settings: Settings, url: str | None = None) -> EngineClient:
    """A client of the engine at ``url``, by default the configured one, and of the verifier's own if it has one.

    Does not connect yet.
    """
    main = HttpEngine(url or settings.engine_address, tokenizer=settings.engine_tokenizer)
    elsewhere, notes = {}, {}
    if settings.prm_url is not None:
        elsewhere[settings.prm_name] = HttpEngine(settings.prm_url, tokenizer=settings.prm_tokenizer)
    if settings.prm_format is not None:
        notes[settings.prm_name] = {"reasoner_prm": settings.prm_format}
    return RoutedEngine(main, elsewhere, notes) if elsewhere or notes else main
