"""``reasoner keys``: make, list and revoke API keys, through the service or directly on its broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.table import Column, Table
from rich.text import Text

from api.cli.console import print_json, result_console
from api.cli.options import PageSize, ServiceOptions, expand_options, parse_duration
from reasoner.client import ServiceError
from workers.broker.embedded import EmbeddedBroker, broker_url
from workers.config.settings import load_settings
from workers.store.broker_errors import BROKER_DOWN, describe_outage
from workers.store.jobs import JobStore
from workers.store.keys import SCOPES, KeySpec, KeyStore, NewKey, NoSuchKey
from workers.store.keys import Key as StoredKey

T = TypeVar("T")

Direct = Annotated[
    bool, typer.Option("--direct", help="On the configured broker instead of through the service; needs no key.")
]

keys = typer.Typer(no_args_is_help=True)
_out = result_console()


@keys.command()
@expand_options
def create(
    name: Annotated[str, typer.Argument(help="For people: where the key is used, such as 'notebook'.")],
    service: ServiceOptions,
    owner: Annotated[
        str | None,
        typer.Option(help="Owner of its jobs; keys of one owner see the same jobs. Default: an owner of its own."),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(sorted(SCOPES))}; may be repeated. Default: jobs:read and jobs:write."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A name or model that its jobs may give as a model; may be repeated. Default: all."),
    ] = None,
    expires: Annotated[str | None, typer.Option(help="How long the key is valid, such as 90d, 12h or 30m.")] = None,
    direct: Direct = False,
) -> None:
    """Make a key and print it, this one time. The first key of a service is made with --direct."""
    fields = {
        "name": name,
        "owner": owner,
        "scopes": scope or None,
        "models": model or None,
        "expires_in": _parse_expiry(expires),
    }
    spec = {field: value for field, value in fields.items() if value is not None}
    if direct:
        made = _on_broker(lambda store: store.create(_parse_spec(spec)))
    else:
        with service.connect() as client:
            made = NewKey.model_validate(client.create_key(spec))
    _print(made, service.as_json)


@keys.command("list")
@expand_options
def list_keys(
    service: ServiceOptions,
    limit: PageSize = 20,
    after: Annotated[str | None, typer.Option(help="Id of the last key of the previous page.")] = None,
    direct: Direct = False,
) -> None:
    """List keys, newest first, without their secrets."""
    if direct:
        stored = _on_broker(lambda store: store.list_keys(after=after, limit=limit + 1))
        shown: list[dict[str, Any]] = [item.model_dump() for item in stored[:limit]]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        page: dict[str, Any] = {"data": shown, "first_id": first, "last_id": last, "has_more": len(stored) > limit}
    else:
        with service.connect() as client:
            page = client.list_keys(limit=limit, after=after)
    if service.as_json:
        print_json(page)
        return
    table = Table(Column("key", no_wrap=True), "name", "owner", "scopes", "models", "state", box=None)
    for item in map(StoredKey.model_validate, page["data"]):
        table.add_row(
            item.id,
            Text(item.name),
            item.owner,
            " ".join(item.scopes),
            Text(", ".join(item.models or ["all"])),
            _describe_state(item),
        )
    _out.print(table)


@keys.command()
@expand_options
def revoke(
    key_id: Annotated[str, typer.Argument(help="Id of the key, as in 'reasoner keys list'.")],
    service: ServiceOptions,
    direct: Direct = False,
) -> None:
    """Revoke a key: its next request is refused. The jobs of its owner continue."""
    if direct:
        _print(_on_broker(lambda store: store.revoke(key_id)), service.as_json)
        return
    with service.connect() as client:
        _print(StoredKey.model_validate(client.revoke_key(key_id)), service.as_json)


def _on_broker(action: Callable[[KeyStore], Awaitable[T]]) -> T:
    """Run an action on the keys of the configured broker; the embedded one is started if it does not run."""
    settings = load_settings()

    async def run() -> T:
        store = JobStore(broker_url(settings))
        try:
            return await action(KeyStore(store))
        except NoSuchKey as error:
            raise ServiceError(f"there is no key {str(error)!r}: 'reasoner keys list' shows the ids") from None
        except BROKER_DOWN as error:
            raise ServiceError(f"{describe_outage(error)}: start it, or correct REASONER_REDIS_URL") from None
        finally:
            await store.close()

    if settings.redis_url is not None:
        return asyncio.run(run())
    with EmbeddedBroker(settings.data_dir):
        return asyncio.run(run())


def _parse_spec(spec: dict[str, Any]) -> KeySpec:
    try:
        return KeySpec.model_validate(spec)
    except ValidationError as error:
        first = error.errors()[0]
        raise typer.BadParameter(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _parse_expiry(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = parse_duration(text)
    if seconds is None:
        raise typer.BadParameter(
            f"{text!r} is not a duration: write a number and s, m, h, d or w, such as 90d", param_hint="--expires"
        )
    return seconds


def _describe_state(item: StoredKey) -> str:
    if item.revoked_at is not None:
        return "revoked"
    if item.expires_at is None:
        return "valid"
    left = item.expires_at - time.time()
    return "expired" if left <= 0 else f"valid for {left / 86_400:.1f} days"


def _print(item: BaseModel, as_json: bool) -> None:
    if as_json:
        print(item.model_dump_json(indent=2))
        return
    assert isinstance(item, StoredKey)
    _out.print(Text(f"{item.id}  {item.name}", style="bold"))
    _out.print(Text(f"  owner {item.owner}, may {', '.join(item.scopes)}: {_describe_state(item)}"))
    if isinstance(item, NewKey):
        _out.print(Text("  The key, which is shown only now:"))
        print(item.key)  # on a line of its own, never wrapped
