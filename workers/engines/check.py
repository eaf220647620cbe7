"""Check of the configured engines of others: do they compute the models that they serve?"""

from __future__ import annotations

from engine.protocol.types import EngineError
from engine.remote.consistency import Consistency, check_server
from engine.remote.urls import hide_login
from workers.config.settings import Settings
from workers.engines.connect import Endpoint, list_endpoints


async def check_engines(settings: Settings) -> list[Consistency]:
    """Check one server after the other, since several may share a processor.

    Without an address the engine is that of ``reasoner serve``, whatever listens at the default one.
    """
    endpoints = [endpoint for endpoint in list_endpoints(settings) if endpoint.models or settings.engine_url]
    return [result for endpoint in endpoints for url in endpoint.urls for result in await _check_server(endpoint, url)]


async def _check_server(endpoint: Endpoint, url: str) -> list[Consistency]:
    try:
        return await check_server(
            url,
            models=endpoint.models,
            api_key=endpoint.key,
            tokenizer=endpoint.tokenizer,
            dialect=endpoint.kind,
            chat=endpoint.chat,
        )
    except EngineError as error:
        name = ", ".join(endpoint.models) or "engine"
        return [
            Consistency(name, hide_login(url), server="", verdict="unreachable", detail=f"cannot be asked: {error}")
        ]
