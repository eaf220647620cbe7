"""HTTP clients of servers, which all jobs of an event loop share, so that each finds open connections."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import httpx

from engine.protocol.types import InvalidRequest
from engine.remote.proxies import InvalidProxy, find_proxy, get_ssl_context
from engine.remote.urls import hide_login

_LIMITS = httpx.Limits(max_connections=1024, max_keepalive_connections=256)
"""A search sends as many requests at once as it has branches with different parents."""
_NUM_SHARDS = 8
"""Clients of one server. httpx walks through all connections of a client for each request, which takes milliseconds
where there are a thousand."""


@dataclass(frozen=True, slots=True)
class ServerClient:
    """A client of one server. ``via``: names the proxy in messages; empty without one."""

    http: httpx.AsyncClient
    via: str


class HttpClients:
    """Opens each client once, at its first use. Belongs to one event loop."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, float, int], ServerClient] = {}
        self._shards = itertools.cycle(range(_NUM_SHARDS))

    def get(self, url: str, silence_seconds: float) -> ServerClient:
        """Return a client of the server at a URL without ``/v1``. Raises ``InvalidRequest`` for any other URL."""
        key = url, silence_seconds, next(self._shards)
        if key not in self._clients:
            self._clients[key] = _open(url, silence_seconds)
        return self._clients[key]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.http.aclose()
        self._clients.clear()


def _open(url: str, silence_seconds: float) -> ServerClient:
    via = ""
    if url.startswith("unix://"):
        transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix://"), limits=_LIMITS, verify=False)
        base = "http://engine"
    elif url.startswith(("http://", "https://")):
        # Without certificates for plain http: reading them takes longer than many requests.
        verify = get_ssl_context() if url.startswith("https://") else False
        proxy = _find_proxy(url)
        transport, base = httpx.AsyncHTTPTransport(limits=_LIMITS, verify=verify, proxy=proxy), url
        via = "" if proxy is None else f" through the proxy {hide_login(str(proxy.url))}"
    else:
        raise InvalidRequest(f"engine URL {url!r} must be http://host:port or unix:///path/to/socket", "url")
    # A request waits for a free connection as long as those before it take, within its own time limit.
    timeout = httpx.Timeout(connect=5.0, write=30.0, pool=None, read=silence_seconds)
    http = httpx.AsyncClient(base_url=base, transport=transport, timeout=timeout, trust_env=False)
    return ServerClient(http, via)


def _find_proxy(url: str) -> httpx.Proxy | None:
    try:
        return find_proxy(url)
    except InvalidProxy as error:
        raise InvalidRequest(str(error), "url") from None
