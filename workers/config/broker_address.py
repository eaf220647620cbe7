"""The URL of the broker, read once: the store's and Celery's connections get the same arguments from it.

Messages never quote the URL, since any part of a mistyped one may belong to the password.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

DEFAULT_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
_MAX_DATABASE_DIGITS = 9
_FORMS = (
    "redis://HOST:PORT/DATABASE, rediss://HOST:PORT/DATABASE (TLS), redis+sentinel://HOST:PORT,HOST:PORT/NAME/DATABASE "
    "(with the name of the primary there) or unix:///PATH?db=DATABASE"
)
_SENTINEL = "redis+sentinel://"
_SENTINEL_FORM = "redis+sentinel://HOST:26379,HOST:26379/NAME/DATABASE"
_LOGIN = "the login goes before the @, as in redis://USER:PASSWORD@HOST"
_VERIFICATION = ("required", "optional", "none")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = ("ssl_cert_reqs", "ssl_check_hostname", *_FILES, "ssl_password")

Kind = Literal["tcp", "tls", "unix"]


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The address of a broker, with its login."""

    kind: Kind
    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str = ""
    """The Unix socket."""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    """Arguments of redis-py's TLS connections, each with its name."""
    sentinels: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of the Sentinels that know the primary; none for a server that is named itself."""
    service: str = ""
    """The name under which the Sentinels know the primary."""
    sentinel_login: tuple[str | None, str | None] = field(default=(None, None), repr=False)
    """User and password of the Sentinels."""

    @property
    def connection_arguments(self) -> dict[str, Any]:
        """The keyword arguments of redis-py's connection class for this kind of address."""
        place: dict[str, Any] = {"host": self.host, "port": self.port}
        if self.kind == "unix":
            place = {"path": self.path}
        elif self.sentinels:
            place = {"sentinels": self.sentinels, "service": self.service, "sentinel_login": self.sentinel_login}
        return {**place, "db": self.database, "username": self.username, "password": self.password, **dict(self.tls)}

    @property
    def public_url(self) -> str:
        """The URL without the login, for logs."""
        if self.kind == "unix":
            return f"{socket_url(Path(self.path))}?db={self.database}"
        scheme = "rediss" if self.kind == "tls" else "redis"
        if self.sentinels:
            hosts = ",".join(_write_host(*place) for place in self.sentinels)
            return f"{scheme}+sentinel://{hosts}/{quote(self.service, safe='')}/{self.database}"
        return f"{scheme}://{_write_host(self.host, self.port)}/{self.database}"


def _write_host(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_url(path: Path) -> str:
    """Return the URL of a broker's Unix socket."""
    return f"unix://{quote(str(path))}"


def parse_broker_url(url: str) -> BrokerAddress:
    """Return the address in a URL. Raises ``ValueError``, without a part of the URL, for one that is not clear.

    Refused is what redis-py ignores or guesses: a password with characters that end the login, options of other
    clients, a database that is not a number.
    """
    parts = _split(url)
    username, password = (_decode(part) for part in (parts.username, parts.password))
    query = _read_query(parts)
    if parts.scheme == "unix":
        if parts.hostname is not None or not parts.path.startswith("/"):
            raise ValueError("the path of a Unix socket begins with the third slash: unix:///PATH")
        database = _read_database(query.pop("db", "0"), "unix:///PATH?db=3")
        _refuse_options(query, "db")
        path = _decode(parts.path) or ""
        return BrokerAddress("unix", path=path, database=database, username=username, password=password)
    if parts.scheme.endswith("+sentinel"):
        return _read_sentinels(parts, query, username=username, password=password)
    if "db" in query:
        raise ValueError("the database is the path, as in redis://HOST:6379/3: there is no option db")
    host = _read_host(parts)
    database = _read_database(parts.path.removeprefix("/") or "0", "redis://HOST:6379/3")
    if parts.scheme == "redis":
        _refuse_options(query)
        return BrokerAddress(
            "tcp", host, port=_read_port(parts), path="", database=database, username=username, password=password
        )
    tls = _read_tls_options(query)
    return BrokerAddress(
        "tls", host, port=_read_port(parts), path="", database=database, username=username, password=password, tls=tls
    )


def _split(url: str) -> SplitResult:
    if not url.startswith(("redis://", "rediss://", "unix://", _SENTINEL, "rediss+sentinel://")):
        raise ValueError(f"must be {_FORMS}; clusters are not supported")
    if not url.isprintable() or " " in url:
        raise ValueError("must have no spaces and control characters: a space in a password is %20")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"must be {_FORMS}; in a password [ is %5B and ] is %5D") from None
    login, at, _ = parts.netloc.rpartition("@")
    if parts.fragment or url.endswith("#") or "@" in parts.path + parts.query or (at and "@" in login):
        raise ValueError("in a login / is %2F, ? is %3F, # is %23 and @ is %40")
    return parts


def _decode(text: str | None) -> str | None:
    """Return the text without percent-encoding; ``None`` if it is empty."""
    try:
        return unquote(text, errors="strict") if text else None
    except UnicodeDecodeError:
        raise ValueError("its percent-encoding must be of UTF-8") from None


def _read_sentinels(
    parts: SplitResult, query: dict[str, str], username: str | None, password: str | None
) -> BrokerAddress:
    """Return the address of the primary that Sentinels know. The login before the @ is that of the primary."""
    login = (query.pop("sentinel_username", None), query.pop("sentinel_password", None))
    name, _, database = parts.path.removeprefix("/").partition("/")
    service = _decode(name)
    if not service:
        raise ValueError(f"the name of the primary is the path, as in {_SENTINEL_FORM}")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if not all(hosts):
        raise ValueError(f"a host is missing, as in {_SENTINEL_FORM}")
    sentinels = [_split(f"redis://{host}") for host in hosts]
    is_tls = parts.scheme.startswith("rediss")
    if not is_tls:
        _refuse_options(query, "sentinel_username", "sentinel_password")
    return BrokerAddress(
        "tls" if is_tls else "tcp",
        database=_read_database(database or "0", _SENTINEL_FORM.replace("DATABASE", "3")),
        username=username,
        password=password,
        tls=_read_tls_options(query) if is_tls else (),
        sentinels=tuple((_read_host(each), _read_port(each, SENTINEL_PORT)) for each in sentinels),
        service=service,
        sentinel_login=login,
    )


def _read_host(parts: SplitResult) -> str:
    host = _decode(parts.hostname) or "localhost"
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"the host is not a name; {_LOGIN}") from None
    return host


def _read_port(parts: SplitResult, default: int = DEFAULT_PORT) -> int:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"the port must be a number from 1 to 65535; {_LOGIN}")
    return default if port is None else port


def _read_database(text: str, example: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DATABASE_DIGITS):
        raise ValueError(f"the database must be a number, as in {example}")
    return int(text)


def _read_query(parts: SplitResult) -> dict[str, str]:
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = dict(pairs)
    if len(query) < len(pairs):
        raise ValueError("an option is given twice")
    if query.keys() & {"username", "password"}:
        example = "unix://USER:PASSWORD@/PATH" if parts.scheme == "unix" else "redis://USER:PASSWORD@HOST"
        raise ValueError(f"the login goes before the @, as in {example}: there are no options username and password")
    return query


def _refuse_options(query: Mapping[str, str], *known: str) -> None:
    if query.keys() - set(known):
        raise ValueError(f"has an unknown option behind the ?; known are {', '.join(known) or 'none'}; {_LOGIN}")


def _read_tls_options(query: Mapping[str, str]) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of TLS connections. The certificate is verified unless the URL says otherwise."""
    _refuse_options(query, *_TLS_OPTIONS)
    if query.get("ssl_cert_reqs", "required") not in _VERIFICATION:
        raise ValueError(f"ssl_cert_reqs must be one of {', '.join(_VERIFICATION)}")
    checks_host = query.get("ssl_check_hostname", "true")
    if checks_host not in ("true", "false"):
        raise ValueError("ssl_check_hostname must be true or false")
    for name in _FILES:
        if name in query and not Path(query[name]).is_file():
            raise ValueError(f"{name} must be an existing file")
    if "ssl_keyfile" in query and "ssl_certfile" not in query:
        raise ValueError("ssl_keyfile needs the certificate of that key, ssl_certfile")
    tls: dict[str, Any] = {"ssl_cert_reqs": "required", **query, "ssl_check_hostname": checks_host == "true"}
    if "ssl_certfile" in query:
        tls.setdefault("ssl_password", "")  # otherwise OpenSSL would ask for it on the terminal
    return tuple(tls.items())
