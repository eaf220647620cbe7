"""The proxy of the environment for an address: none for this machine, that of the scheme for others.

Read are ``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``, in small letters too, which take precedence.
httpx reads the same, but without the exception for this machine, and fails on entries of ``NO_PROXY`` such as networks.
"""

from __future__ import annotations

import functools
import importlib.util
import ipaddress
import re
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

_SCHEMES = ("http", "https", "socks5", "socks5h")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class InvalidProxy(ValueError):
    """A variable of the environment names a proxy that cannot be used. The message has no login."""


def client_options(url: str) -> dict[str, Any]:
    """Return the keyword arguments of httpx's clients and functions for requests to one server.

    Raises ``InvalidProxy``.
    """
    # Without certificates for plain http: reading them takes longer than many requests.
    verify = get_ssl_context() if url.startswith("https://") else False
    return {"trust_env": False, "verify": verify, "proxy": find_proxy(url)}


def find_proxy(url: str) -> httpx.Proxy | None:
    """Return the proxy for requests to a URL; ``None`` for a direct connection. Raises ``InvalidProxy``."""
    proxy = find_proxy_url(url)
    return None if proxy is None else httpx.Proxy(proxy)


def find_proxy_url(url: str) -> str | None:
    """Return the address, with its login, of the proxy that ``find_proxy`` returns."""
    parts = urlsplit(url)
    host = (parts.hostname or "").removesuffix(".")
    if parts.scheme not in ("http", "https") or is_this_machine(host):
        return None
    proxies = getproxies()
    name = next((name for name in (parts.scheme, "all") if proxies.get(name)), None)
    if name is None or _is_excluded(host, parts.port, proxies.get("no", "")):
        return None
    return _check_proxy_url(proxies[name].strip(), f"{name.upper()}_PROXY")


def is_this_machine(host: str) -> bool:
    """Return True for the names and addresses of this machine alone: loopback, and those of its interfaces."""
    host = host.lower()
    if host in ("", "localhost", socket.gethostname().lower()) or host.endswith(".localhost"):
        return True
    address = _parse_address(host)
    return address is not None and (address.is_loopback or address.is_unspecified or _is_own(str(address)))


@functools.cache
def get_ssl_context() -> ssl.SSLContext:
    """Return the context that verifies servers, with the authorities of ``SSL_CERT_FILE`` if that is set."""
    return httpx.create_ssl_context()


@functools.cache
def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _parse_address(host: str) -> _Address | None:
    """Return an IP address, also in a short form such as ``127.1``; ``None`` for a name."""
    try:
        address: _Address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        if not re.fullmatch(r"[0-9a-fx.]+", host):
            return None
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_excluded(host: str, port: int | None, no_proxy: str) -> bool:
    """Return True if an entry of ``NO_PROXY`` names the host: a domain, an address or a network, perhaps with a port.

    An entry that is none of them matches nothing.
    """
    return any(_matches_host(entry, host, port) for entry in re.split(r"[,\s]+", no_proxy.lower()) if entry)


def _matches_host(entry: str, host: str, port: int | None) -> bool:
    if entry == "*":
        return True
    entry = entry.partition("://")[2] or entry
    with_port = re.fullmatch(r"(\[.*\]|[^:]*):(\d+)", entry)
    if with_port is not None:
        entry = with_port[1]
        if port != int(with_port[2]):
            return False
    entry = re.sub(r"^\[(.*)\]$", r"\1", entry)
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError:
        pass
    else:
        address = _parse_address(host)
        return address is not None and address in network
    domain = entry.removeprefix("*").strip(".")
    return bool(domain) and (host == domain or host.endswith(f".{domain}"))


def _check_proxy_url(text: str, variable: str) -> str:
    url = text if "://" in text else f"http://{text}"
    scheme = url.partition("://")[0].lower()
    if scheme not in _SCHEMES:
        raise InvalidProxy(f"{variable}: a proxy's address begins with {', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}")
    if scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        raise InvalidProxy(f"{variable}: SOCKS needs a package: pip install socksio")
    try:
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and parts.port != 0
        httpx.Proxy(url)
    except (ValueError, httpx.InvalidURL):
        is_valid = False
    if not is_valid:
        raise InvalidProxy(f"{variable}: not the address of a proxy, which is http://HOST:PORT")
    return url
