"""HTTP clients of servers, which all jobs of an event loop share, so that each finds open connections."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from engine.protocol.types import InvalidRequest
from engine.remote.proxies import InvalidProxy, find_proxy, get_ssl_context
from engine.remote.urls import hide_login

_LIMITS = httpx.Limits(max_connections=1024, max_keepalive_connections=256)
"""A search sends as many requests at once as it has branches with different parents."""


@dataclass(frozen=True, slots=True)
class ServerClient:
    """A client of one server. ``via``: names the proxy in messages; empty without one."""

    http: httpx.AsyncClient
    via: str


class HttpClients:
    """Opens each client once, at its first use. Belongs to one event loop."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, float], ServerClient] = {}

    def get(self, url: str, silence_seconds: float) -> ServerClient:
        """Return a client of the server at a URL without ``/v1``. Raises ``InvalidRequest`` for any other URL."""
        key = url, silence_seconds
        if key not in self._clients:
            self._clients[key] = _open(url, silence_seconds)
        return self._clients[key]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.http.aclose()
        self._clients.clear()


def _open(url: str, silence_seconds: float) -> ServerClient:
    transport: httpx.AsyncBaseTransport
    via = ""
    if url.startswith("unix://"):
        transport, base = _open_transport(verify=False, uds=url.removeprefix("unix://")), "http://engine"
    elif url.startswith(("http://", "https://")):
        # Without certificates for plain http: reading them takes longer than many requests.
        verify = get_ssl_context() if url.startswith("https://") else False
        proxy = _find_proxy(url)
        transport, base = _open_transport(verify=verify), url
        if proxy is not None:  # httpx's own, which names what a proxy answers, and knows SOCKS
            transport = httpx.AsyncHTTPTransport(limits=_LIMITS, verify=verify, proxy=proxy)
            via = f" through the proxy {hide_login(str(proxy.url))}"
    else:
        raise InvalidRequest(f"engine URL {url!r} must be http://host:port or unix:///path/to/socket", "url")
    # A request waits for a free connection as long as those before it take, within its own time limit.
    timeout = httpx.Timeout(connect=5.0, write=30.0, pool=None, read=silence_seconds)
    # No cookies: those of a balancer would keep the jobs that share a client on one of its servers.
    cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    http = httpx.AsyncClient(base_url=base, transport=transport, timeout=timeout, trust_env=False, cookies=cookies)
    return ServerClient(http, via)


def _open_transport(verify: ssl.SSLContext | bool, uds: str | None = None) -> httpx.AsyncBaseTransport:
    """Return the connections to a server: aiohttp's take a third of the processor time of httpx's own."""
    from httpx_aiohttp import AiohttpTransport  # a fifth of a second, which not every command needs

    return AiohttpTransport(limits=_LIMITS, verify=verify, uds=uds)


def _find_proxy(url: str) -> httpx.Proxy | None:
    try:
        return find_proxy(url)
    except InvalidProxy as error:
        raise InvalidRequest(str(error), "url") from None
