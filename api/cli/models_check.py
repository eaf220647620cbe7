"""``reasoner models --check``: do the engines of others compute the models that they serve?"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import typer
from rich.console import Console

from api.cli.console import print_json
from api.cli.render import plain
from engine.client.connection import hide_login
from engine.client.consistency import Consistency, check_server
from engine.protocol.types import EngineError
from workers.config.settings import load_settings
from workers.engines.connect import Place, list_places


def check_models(out: Console, *, as_json: bool) -> None:
    """Print a line for each model of the configured servers; exit status 1 if one does not compute what it says."""
    settings = load_settings()
    # Without an address the engine is that of ``reasoner serve``, whatever listens at the default one.
    places = [place for place in list_places(settings) if place.models or settings.engine_url]
    results = asyncio.run(_check_places(places))
    if as_json:
        print_json({"data": [asdict(result) for result in results]})
    elif not results:
        out.print("No engine of others is configured: the service runs its models itself.")
    else:
        for result in results:
            server = f" ({result.server})" if result.server else ""
            out.print(plain(f"{result.model} at {result.url}{server}: {result.detail}"), markup=False, soft_wrap=True)
    if any(result.verdict in ("differs", "unreachable") for result in results):
        raise typer.Exit(1)


async def _check_places(places: list[Place]) -> list[Consistency]:
    """Check one server after the other, since several may share a processor."""
    return [result for place in places for url in place.urls for result in await _check(place, url)]


async def _check(place: Place, url: str) -> list[Consistency]:
    try:
        return await check_server(
            url, models=place.models, api_key=place.key, tokenizer=place.tokenizer, dialect=place.kind, chat=place.chat
        )
    except EngineError as error:
        name = ", ".join(place.models) or "engine"
        return [Consistency(name, hide_login(url), "", "unreachable", f"cannot be asked: {error}")]
