"""Requests to addresses chosen by clients, protected against server-side request forgery (SSRF).

An address must be https, or its host allowed by the operator. Its name is resolved once, all its addresses must be
public, and the connection goes to a checked one. Redirects are not followed, proxies of the environment are not used,
and only the status of the response is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping

import httpx

TIMEOUT_SECONDS = 10.0
"""The limit for a whole request: name resolution, connecting, sending and the response's head."""
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_UNICAST = ipaddress.ip_network("2000::/3")
"""The part of IPv6 allocated to the public internet."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""NAT64: a network without IPv4 reaches IPv4 through it, with the address in the last 32 bits."""
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
    )
)
"""Protocol assignments (Teredo among them), relays (6to4) and documentation: Python's versions disagree about them."""


class ForbiddenAddress(ValueError):
    """The service does not send to this address; the message names a valid alternative."""


class SendFailed(Exception):
    """The request did not arrive, or its response was not a success."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def check_address(address: str, allowed: Collection[str]) -> httpx.URL:
    """Return the address as it will be used. ``allowed``: hosts that may be private and without TLS.

    Raises ``ForbiddenAddress`` for an address that is invalid without resolving its name.
    """
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ForbiddenAddress(f"not an address: {error}") from None
    host = url.raw_host.decode("ascii").removesuffix(".")
    if not host:
        raise ForbiddenAddress("the address names no host: use https://HOST/PATH")
    if _parse_literal(host) is None and not (len(host) <= 253 and all(map(_LABEL.fullmatch, host.split(".")))):
        raise ForbiddenAddress(f"{url.host!r} is not a host name")
    if not 1 <= (url.port or 443) <= 65535:
        raise ForbiddenAddress(f"there is no port {url.port}: ports go up to 65535")
    if url.userinfo:
        raise ForbiddenAddress("the address must not hold a user or a password: verify the signature instead")
    if url.host.lower() in allowed:
        if url.scheme not in ("http", "https"):
            raise ForbiddenAddress(f"{url.scheme!r} addresses cannot be called: use https://")
    elif url.scheme != "https":
        raise ForbiddenAddress("only https:// addresses are called")
    elif (literal := _parse_literal(url.host)) is not None:
        check_public(literal, url.host)
    return url


def check_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address, host: str) -> None:
    """Raise ``ForbiddenAddress`` for any address that is not one machine in the public internet.

    Refused are addresses that IANA's special-purpose registries do not list as globally reachable, and all embeddings
    of IPv4 in IPv6 but NAT64.
    """
    public = True
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        else:
            public = address in _UNICAST
    public &= address.is_global and not (address.is_multicast or address.is_reserved)
    if not public or any(address in network for network in _NOT_PUBLIC):
        raise ForbiddenAddress(f"{host} is not a public address")


async def post(address: str, body: bytes, headers: Mapping[str, str], *, allowed: Collection[str]) -> None:
    """Send one POST request. Raises ``ForbiddenAddress`` and ``SendFailed``."""
    url = check_address(address, allowed)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            pinned = await _resolve_address(url, private=url.host.lower() in allowed)
            # A separate transport: certificates may come from the environment, proxies may not.
            transport = httpx.AsyncHTTPTransport(retries=0)
            async with httpx.AsyncClient(transport=transport, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
                request = client.build_request(
                    "POST",
                    url.copy_with(host=pinned),
                    content=body,
                    headers={**headers, "Host": url.netloc.decode("ascii")},
                    extensions={"sni_hostname": url.raw_host.decode("ascii")},
                )
                answer = await client.send(request, stream=True, follow_redirects=False)
                await answer.aclose()
    except TimeoutError:
        raise SendFailed(f"no answer within {TIMEOUT_SECONDS:g} s") from None
    except httpx.HTTPError as error:
        raise SendFailed(f"{type(error).__name__}: {error}".rstrip(": ")) from None
    if not answer.is_success:
        redirect = ": redirects are not followed" if answer.is_redirect else ""
        raise SendFailed(f"the answer was {answer.status_code}{redirect}", answer.status_code)


async def _resolve_address(url: httpx.URL, *, private: bool) -> str:
    """Return the IP address to connect to. One private address among several makes the name invalid."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            url.host, url.port or {"http": 80, "https": 443}[url.scheme], type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise SendFailed(f"{url.host} cannot be looked up: {error.strerror}") from None
    addresses = [str(where[0]) for *_, where in found]
    if not private:
        for each in addresses:
            check_public(ipaddress.ip_address(each.partition("%")[0]), url.host)
    return addresses[0]


def _parse_literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
