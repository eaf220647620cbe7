"""Finds out who calls, before anything of the request is read."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.principal import LOCAL, Caller
from api.http.problems import BROKER_UNAVAILABLE, Problem, refuse
from api.http.state import State
from workers.config.settings import Settings
from workers.config.types import is_loopback
from workers.store.jobs import BROKER_DOWN
from workers.store.keys import SCOPES, KeyStore

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json", "/favicon.ico"})
"""What needs no key: health, and what says nothing about anybody, such as the page that asks for the key."""
OPEN_FOLDERS = ("/dashboard/", "/docs/")
RECHECK_SECONDS = 5.0
"""The key of a stream, or of whoever waits for an answer, is looked at again this often."""
_HOST = re.compile(r"(?:\[([^]]+)\]|([^:]+))(?::\d+)?")


class Authenticate:
    """Puts the ``Caller`` into the request's state, or refuses with 401.

    While there are no keys at all, neither configured nor in the store, whoever reaches this machine's loopback
    interface may do everything. The first key ends that for good.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._digests = [_digest(key.get_secret_value()) for key in settings.api_keys]
        self._loopback = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDERS):
            await self._app(scope, receive, send)
            return
        try:
            scope["state"]["caller"] = await self._caller(scope)
        except Problem as problem:
            await refuse(scope, problem)(scope, receive, send)
            return
        except BROKER_DOWN:  # nobody can say who this is: so it is nobody
            await refuse(scope, BROKER_UNAVAILABLE)(scope, receive, send)
            return
        await self._while_it_holds(scope, receive, send)

    async def _while_it_holds(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers for as long as the key is good. What it opened ends with it: a stream in the middle, like any stream
        that breaks off, and what has not been answered yet with 401."""
        begun = over = False

        async def noted_send(message: Message) -> None:
            nonlocal begun, over
            begun, over = True, message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, receive, noted_send))
        try:
            while True:
                done, _ = await asyncio.wait({answering}, timeout=RECHECK_SECONDS)
                if done:
                    return answering.result()
                try:
                    await self._caller(scope)
                except Problem as problem:
                    refusal = problem
                    break
                except BROKER_DOWN:  # streams outlast it
                    continue
        finally:
            answering.cancel()
            await asyncio.wait({answering})
        if not begun:
            await refuse(scope, refusal)(scope, receive, send)
        elif not over:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _caller(self, scope: Scope) -> Caller:
        state: State = scope["app"].state.service
        keys = KeyStore(state.store)
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        text = key.strip() if scheme.lower() == "bearer" else ""
        if (configured := self._configured(text)) is not None:
            return configured
        if (found := await keys.find(text)) is not None:
            if (refusal := found.refusal()) is not None:
                raise _unauthorized(f"{refusal}: use another, or have one made with 'reasoner keys create'")
            return Caller(found.id, found.owner, frozenset(found.scopes))
        if self._digests or not self._loopback or await keys.exist():
            raise _unauthorized("send one of this service's keys as 'Authorization: Bearer KEY'")
        _check_host(scope)
        return LOCAL

    def _configured(self, text: str) -> Caller | None:
        digest = _digest(text)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them: equal time
        return Caller(f"config_{digest.hex()[:16]}", "config", SCOPES) if any(matches) else None


def _check_host(scope: Scope) -> None:
    """A web page that points its own name at 127.0.0.1 would reach this service through its visitor's browser."""
    host = Headers(scope=scope).get("host", "")
    name = _HOST.fullmatch(host)
    if name is None or not is_loopback(name[1] or name[2]):
        raise Problem(
            403,
            "foreign-host",
            f"a service without keys is for this machine alone, and {host!r} is another name: call it as 127.0.0.1 or "
            "localhost, or make a key with 'reasoner keys create'",
        )


def _unauthorized(detail: str) -> Problem:
    return Problem(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
