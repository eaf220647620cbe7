"""Check of the configured engines of others: do they compute the models that they serve?"""

from __future__ import annotations

from engine.protocol.types import EngineError
from engine.remote.connection import hide_login
from engine.remote.consistency import Consistency, check_server
from workers.config.settings import Settings
from workers.engines.connect import Place, list_places


async def check_engines(settings: Settings) -> list[Consistency]:
    """Check one server after the other, since several may share a processor.

    Without an address the engine is that of ``reasoner serve``, whatever listens at the default one.
    """
    places = [place for place in list_places(settings) if place.models or settings.engine_url]
    return [result for place in places for url in place.urls for result in await _check_server(place, url)]


async def _check_server(place: Place, url: str) -> list[Consistency]:
    try:
        return await check_server(
            url, models=place.models, api_key=place.key, tokenizer=place.tokenizer, dialect=place.kind, chat=place.chat
        )
    except EngineError as error:
        name = ", ".join(place.models) or "engine"
        return [Consistency(name, hide_login(url), "", "unreachable", f"cannot be asked: {error}")]
