"""``reasoner keys``: the API keys of a service, through the service, or on its broker for the first one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.table import Column, Table
from rich.text import Text

from api.cli.durations import seconds_of
from api.cli.jobs import AsJson, Key, Url, client_of
from api.cli.render import output
from reasoner.client import ServiceError
from workers.broker.embedded import EmbeddedBroker, broker_url
from workers.config.settings import load_settings
from workers.store.jobs import JobStore
from workers.store.keys import SCOPES, KeySpec, KeyStore, NewKey, NoSuchKey
from workers.store.keys import Key as StoredKey
from workers.store.redis_client import BROKER_DOWN

T = TypeVar("T")

Direct = Annotated[
    bool,
    typer.Option("--direct", help="Not through the service but on its broker, as configured here. Needs no key."),
]

keys = typer.Typer(no_args_is_help=True)
_out = output()


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Where the key is used, such as 'notebook'.")],
    owner: Annotated[
        str | None, typer.Option(help="Whose jobs its jobs are: keys of one owner see the same. Else on its own.")
    ] = None,
    scope: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(sorted(SCOPES))}; may be repeated. Else jobs:*.")
    ] = None,
    expires: Annotated[str | None, typer.Option(help="How long it is good for, such as 90d, 12h or 30m.")] = None,
    direct: Direct = False,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: nobody can show it again. The first key of a service is made with --direct."""
    asked = {"name": name, "owner": owner, "scopes": scope or None, "expires_in": _seconds(expires)}
    spec = {field: value for field, value in asked.items() if value is not None}
    if direct:
        made = _on_broker(lambda store: store.create(_checked(spec)))
    else:
        with client_of(url, key) as client:
            made = NewKey.model_validate(client.create_key(spec))
    _print(made, as_json)


@keys.command("list")
def list_keys(
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    after: Annotated[str | None, typer.Option(help="Id of the last key of the previous page.")] = None,
    direct: Direct = False,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List keys, newest first: not the keys themselves, which nobody has but their holders."""
    if direct:
        found = _on_broker(lambda store: store.list_keys(after=after, limit=limit + 1))
        shown: list[dict[str, Any]] = [item.model_dump() for item in found[:limit]]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        page: dict[str, Any] = {"data": shown, "first_id": first, "last_id": last, "has_more": len(found) > limit}
    else:
        with client_of(url, key) as client:
            page = client.list_keys(limit=limit, after=after)
    if as_json:
        print(json.dumps(page, indent=2))
        return
    table = Table(Column("key", no_wrap=True), "name", "owner", "scopes", "state", box=None)
    for item in map(StoredKey.model_validate, page["data"]):
        table.add_row(item.id, Text(item.name), item.owner, " ".join(item.scopes), _state(item))
    _out.print(table)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="As 'reasoner keys list' shows it.")],
    direct: Direct = False,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key, from its next request on. Its owner's jobs go on."""
    if direct:
        _print(_on_broker(lambda store: store.revoke(key_id)), as_json)
        return
    with client_of(url, key) as client:
        _print(StoredKey.model_validate(client.revoke_key(key_id)), as_json)


def _on_broker(act: Callable[[KeyStore], Awaitable[T]]) -> T:
    """Does something to the keys of the configured broker; starts the embedded one if it is that and does not run."""
    settings = load_settings()

    async def run() -> T:
        store = JobStore(broker_url(settings))
        try:
            return await act(KeyStore(store))
        except NoSuchKey as error:
            raise ServiceError(f"there is no key {str(error)!r}") from None
        except BROKER_DOWN as error:
            raise ServiceError(f"the broker cannot be reached: {error}") from None
        finally:
            await store.close()

    if settings.redis_url is not None:
        return asyncio.run(run())
    with EmbeddedBroker(settings.data_dir):
        return asyncio.run(run())


def _checked(spec: dict[str, Any]) -> KeySpec:
    try:
        return KeySpec.model_validate(spec)
    except ValidationError as error:
        found = error.errors()[0]
        raise typer.BadParameter(f"{'.'.join(map(str, found['loc']))}: {found['msg']}") from None


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = seconds_of(text)
    if seconds is None:
        raise typer.BadParameter(f"{text!r} is no time: write a number and s, m, h, d or w", param_hint="--expires")
    return seconds


def _state(item: StoredKey) -> str:
    if item.revoked_at is not None:
        return "revoked"
    if item.expires_at is None:
        return "good"
    left = item.expires_at - time.time()
    return "expired" if left <= 0 else f"good for {left / 86_400:.1f} days"


def _print(item: BaseModel, as_json: bool) -> None:
    if as_json:
        print(item.model_dump_json(indent=2))
        return
    assert isinstance(item, StoredKey)
    _out.print(Text(f"{item.id}  {item.name}", style="bold"))
    _out.print(Text(f"  owner {item.owner}, may {', '.join(item.scopes)}: {_state(item)}"))
    if isinstance(item, NewKey):
        _out.print(Text("  This is the only time that it is shown:"))
        print(item.key)  # alone on its line, whatever the width of the terminal
