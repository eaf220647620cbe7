"""URLs of the broker: one reading for the store and Celery, and refusals that keep the password."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import parse_url

from workers.broker.transport import WakeupTransport
from workers.broker.wakeups import make_celery
from workers.config.broker_address import parse_broker_url
from workers.config.settings import load_settings
from workers.config.types import ConfigError
from workers.store.redis_client import RedisClient

PASSWORD = "kD9-mVq2.xR7_tW4"
TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=12)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h/",
        "redis://h:1/2",
        "redis://:p@h:1/2",
        "redis://u:p@h",
        "redis://u@h",
        "redis://[::1]:7/15",
        "redis://u:a%2Fb%40c%23d%3Fe%25f@h:1/0",
        "rediss://u:p@h:2/3",
        "rediss://h?ssl_cert_reqs=none",
        "rediss://h/1?ssl_check_hostname=false",
        "unix:///a/b.sock",
        "unix:///a/b.sock?db=3",
        "unix://u:p@/a%20b.sock?db=3",
    ],
)
def test_the_store_and_celery_connect_with_the_arguments_that_redis_py_reads(url: str) -> None:
    read = dict(parse_url(url))
    read.pop("connection_class", None)
    defaults = {"db": 0, "username": None, "password": None}
    defaults |= {} if url.startswith("unix") else {"port": 6379}
    tls = {"ssl_cert_reqs": "required", "ssl_check_hostname": True} if url.startswith("rediss") else {}
    expected = {**defaults, **tls, **read}

    store = RedisClient(url)._redis.connection_pool
    celerys = _celery_arguments(url)
    for arguments in (store.connection_kwargs, celerys):
        assert {name: arguments[name] for name in expected} == expected
    kinds = [kind.__name__.replace("Async", "") for kind in (store.connection_class, celerys["connection_class"])]
    assert kinds[0] == kinds[1]


def _celery_arguments(url: str) -> dict[str, Any]:
    """Return the arguments of Celery's connection, without a channel's constructor, which connects."""
    channel = object.__new__(WakeupTransport.Channel)
    client = make_celery(load_settings(redis_url=url)).connection_for_write()
    channel.connection = SimpleNamespace(client=client, default_port=6379)
    arguments: dict[str, Any] = channel._connparams()
    return arguments


@given(username=TEXTS, password=TEXTS)
def test_any_login_can_be_written_in_percent_encoding(username: str, password: str) -> None:
    address = parse_broker_url(f"redis://{quote(username, safe='')}:{quote(password, safe='')}@h:1/2")
    assert (address.username, address.password, address.host, address.database) == (username, password, "h", 2)


REFUSED = [
    f"redis://:{PASSWORD}@h?db=3",
    f"redis://:{PASSWORD}@h/0?db=0",
    f"redis://:{PASSWORD}@h/abc",
    f"redis://:{PASSWORD}@h/1/2",
    f"redis://:{PASSWORD}@h/-1",
    f"redis://:{PASSWORD}@h/{'9' * 5000}",
    f"redis://h?password={PASSWORD}",
    f"redis://u:{PASSWORD}@h?{PASSWORD}=1",
    f"unix:///a.sock?password={PASSWORD}",
    f"unix:///a.sock?username={PASSWORD}&db=1",
    f"unix:///a.sock?db={PASSWORD}",
    f"unix:///a.sock?virtual_host={PASSWORD}",
    f"unix://:{PASSWORD}@a.sock",
    f"unix://:{PASSWORD}@/a.sock?db=1&db=2",
    f"unix:/{PASSWORD}",
    f"redis://:{PASSWORD}/x@h:1/2",
    f"redis://:x/{PASSWORD}@h:1/2",
    f"redis://:{PASSWORD}?x@h:1/2",
    f"redis://:{PASSWORD}#x@h:1/2",
    f"redis://:x#{PASSWORD}@h:1/2",
    f"redis://:{PASSWORD}@x@h:1/2",
    f"redis://:[{PASSWORD}@h:1/2",
    f"redis://:{PASSWORD}]@h:1/2",
    f"redis://:{PASSWORD}\u2100@h:1/2",
    f"redis://:{PASSWORD} x@h:1/2",
    f"redis://:{PASSWORD}\n@h:1/2",
    f"redis://:{PASSWORD}%ff@h:1/2",
    f"redis://h:{PASSWORD}",
    f"redis://user:{PASSWORD}",
    f"redis://:{PASSWORD}@h:0",
    f"redis://:{PASSWORD}@h:65536",
    f"redis://:{PASSWORD}@h:port",
    f"redis://:{PASSWORD}@h..i",
    f"rediss://:{PASSWORD}@h?ssl_cert_reqs={PASSWORD}",
    f"rediss://:{PASSWORD}@h?ssl_cert_reqs=CERT_NONE",
    f"rediss://:{PASSWORD}@h?ssl_check_hostname=no",
    f"rediss://:{PASSWORD}@h?ssl_ca_certs=/nowhere/{PASSWORD}.pem",
    f"rediss://:{PASSWORD}@h?ssl_keyfile={__file__}",
    f"redis://:{PASSWORD}@h?ssl_cert_reqs=none",
    f"redis+sentinel://:{PASSWORD}@h:26379",
    f"redis+sentinel://:{PASSWORD}@h:26379/",
    f"redis+sentinel://:{PASSWORD}@h,,i/jobs",
    f"redis+sentinel://:{PASSWORD}@h,i:{PASSWORD}/jobs",
    f"redis+sentinel://:{PASSWORD}@h/jobs/{PASSWORD}",
    f"redis+sentinel://:{PASSWORD}@h/jobs?password={PASSWORD}",
    f"redis+sentinel://h/jobs?sentinel={PASSWORD}",
    f"rediss+sentinel://:{PASSWORD}@h/jobs?ssl_cert_reqs={PASSWORD}",
    f"redis+cluster://:{PASSWORD}@h:1",
    f"redis+socket://:{PASSWORD}@/a.sock",
    f"http://:{PASSWORD}@h",
    f":{PASSWORD}@h:6379",
    PASSWORD,
    "",
]


@pytest.mark.parametrize("url", REFUSED)
@pytest.mark.parametrize("place", ["environment", "file", "command line"])
def test_a_url_that_is_not_clear_is_refused_in_a_line_without_the_password(
    url: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = {}
    if place == "environment":
        monkeypatch.setenv("REASONER_REDIS_URL", url)
    elif place == "file":
        (tmp_path / "reasoner.toml").write_text(f'redis_url = "{url}"'.replace("\n", "\\n"))
    else:
        overrides = {"redis_url": url}
    with pytest.raises(ConfigError) as refused:
        load_settings(**overrides)
    message = str(refused.value)
    shown = message + "".join(traceback.format_exception_only(refused.value))
    assert "redis_url" in message.lower().replace("-", "_")
    assert "\n" not in message
    pieces = {PASSWORD[start : start + 4] for start in range(len(PASSWORD) - 3)}
    assert not [piece for piece in pieces if piece in shown]
    assert refused.value.__suppress_context__


def test_the_address_of_sentinels_is_read_whole() -> None:
    url = f"redis+sentinel://u:{PASSWORD}@a,b:7,[::1]:8/jobs%2F1/3?sentinel_username=s&sentinel_password={PASSWORD}"
    address = parse_broker_url(url)
    assert address.sentinels == (("a", 26379), ("b", 7), ("::1", 8))
    assert (address.service, address.database, address.sentinel_login) == ("jobs/1", 3, ("s", PASSWORD))
    assert (address.username, address.password) == ("u", PASSWORD)
    assert address.public_url == "redis+sentinel://a:26379,b:7,[::1]:8/jobs%2F1/3"
    again = parse_broker_url(address.public_url)
    assert (again.sentinels, again.service, again.database) == (address.sentinels, address.service, 3)
    assert parse_broker_url("rediss+sentinel://a/jobs").tls == parse_broker_url("rediss://a").tls
    connections = RedisClient(url)._redis.connection_pool.connection_kwargs
    assert {name: _celery_arguments(url)[name] for name in ("sentinels", "service", "sentinel_login", "db")} == {
        name: connections[name] for name in ("sentinels", "service", "sentinel_login", "db")
    }


def test_the_address_for_logs_has_no_login() -> None:
    for url in (f"redis://u:{PASSWORD}@h:1/2", f"unix://u:{PASSWORD}@/a%20b?db=1", f"rediss://:{PASSWORD}@[::1]"):
        settings = load_settings(redis_url=url)
        app = make_celery(settings)
        address = parse_broker_url(url)
        connection = app.connection_for_write()
        for text in (address.public_url, repr(address), connection.as_uri(), repr(connection), str(app.conf)):
            assert PASSWORD not in text
        again = parse_broker_url(address.public_url)
        assert (again.host, again.port, again.path, again.database) == (
            (address.host, address.port, address.path, address.database)
        )
