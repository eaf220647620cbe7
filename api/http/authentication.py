"""Authentication by API key, before anything else of a request is read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.principal import LOCAL_PRINCIPAL, Principal
from api.http.problems import Problem, broker_problem, refusal_response
from api.http.state import ServiceState
from workers.config.settings import Settings
from workers.config.types import is_loopback
from workers.store.broker_errors import BROKER_DOWN
from workers.store.keys import SCOPES, KeyStore

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/docs", "/openapi.json", "/favicon.ico"})
"""Paths that need no key: health checks, and pages without any data."""
OPEN_FOLDERS = ("/dashboard/", "/docs/")
RECHECK_SECONDS = 5.0
"""Interval at which the key of an open request is checked again."""
_HOST = re.compile(r"(?:\[([^]]+)\]|([^:]+))(?::\d+)?")


class AuthenticationMiddleware:
    """Puts the ``Principal`` into the state of the request, or answers 401.

    While there are no keys at all, neither configured nor stored, every caller on the loopback interface of this
    machine has all scopes. The first key ends that for good.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._configured_digests = [_hash_token(key.get_secret_value()) for key in settings.api_keys]
        self._origins = settings.cors_origins
        self._is_loopback = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDERS):
            await self._app(scope, receive, send)
            return
        try:
            scope["state"]["principal"] = await self._authenticate(scope)
        except Problem as problem:
            await refusal_response(scope, problem)(scope, receive, send)
            return
        except BROKER_DOWN as error:  # without the key store no key can be accepted
            await refusal_response(scope, broker_problem(error))(scope, receive, send)
            return
        await self._run_while_authenticated(scope, receive, send)

    async def _run_while_authenticated(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request as long as its key is valid.

        When the key is revoked or expires, a response that has begun is cut off, as by a lost connection, and any other
        becomes a 401.
        """
        has_begun = has_ended = False

        async def tracking_send(message: Message) -> None:
            nonlocal has_begun, has_ended
            has_begun = True
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        request = asyncio.ensure_future(self._app(scope, receive, tracking_send))
        try:
            while True:
                done, _ = await asyncio.wait({request}, timeout=RECHECK_SECONDS)
                if done:
                    return request.result()
                try:
                    await self._authenticate(scope)
                except Problem as problem:
                    refusal = problem
                    break
                except BROKER_DOWN:  # open streams outlast a broker that is briefly away
                    continue
        finally:
            request.cancel()
            await asyncio.wait({request})
        if not has_begun:
            await refusal_response(scope, refusal)(scope, receive, send)
        elif not has_ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _authenticate(self, scope: Scope) -> Principal:
        state: ServiceState = scope["app"].state.service
        keys = KeyStore(state.store)
        token = _read_token(Headers(scope=scope))
        if (configured := self._find_configured(token)) is not None:
            return configured
        if (stored := await keys.find(token)) is not None:
            if (refusal := stored.refusal()) is not None:
                raise _create_unauthorized(f"{refusal}: use another, or have one made with 'reasoner keys create'")
            models = None if stored.models is None else frozenset(stored.models)
            return Principal(stored.id, stored.owner, frozenset(stored.scopes), models)
        if self._configured_digests or not self._is_loopback or await keys.has_any():
            reason = "this API key is unknown" if token else "there is no API key"
            raise _create_unauthorized(
                f"{reason}: send one of this service's keys as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'"
            )
        _check_host(scope)
        if scope["method"] not in ("GET", "HEAD"):
            check_origin(Headers(scope=scope), self._origins)
        return LOCAL_PRINCIPAL

    def _find_configured(self, token: str) -> Principal | None:
        digest = _hash_token(token)
        matches = [hmac.compare_digest(digest, configured) for configured in self._configured_digests]  # constant time
        return Principal(f"config_{digest.hex()[:16]}", "config", SCOPES) if any(matches) else None


def _read_token(headers: Headers) -> str:
    """Return the key of a request: a bearer token, else Anthropic's header; empty without any."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return (credentials if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def _check_host(scope: Scope) -> None:
    """Raise ``Problem`` if the ``Host`` is not this machine.

    Otherwise a web page whose domain resolves to 127.0.0.1 (DNS rebinding) could call the service from the browser of
    its visitor.
    """
    host = Headers(scope=scope).get("host", "")
    name = _HOST.fullmatch(host)
    if name is None or not is_loopback(name[1] or name[2]):
        raise Problem(
            403,
            "foreign-host",
            f"a service without keys accepts requests to this machine only, and {host!r} is another host: call it as "
            "127.0.0.1 or localhost, or make a key with 'reasoner keys create'",
        )


def check_origin(headers: Headers, allowed: tuple[str, ...]) -> None:
    """Raise ``Problem`` for a request of a web page that is neither the service's own nor of a configured origin."""
    origin = headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    with contextlib.suppress(ValueError):
        if urlsplit(origin).netloc == headers.get("host"):
            return
    raise Problem(403, "forbidden-origin", f"pages of {origin!r} may not call this service: add it to cors_origins")


def _create_unauthorized(detail: str) -> Problem:
    return Problem(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})


def _hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
