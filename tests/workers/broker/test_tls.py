"""TLS to the broker: the store and Celery verify the same certificate, before they send the password."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kombu.exceptions import OperationalError

from tests.workers.broker.tls import Certificate, TlsFront, make_certificate, tls_front
from workers.broker.embedded import EmbeddedBroker
from workers.broker.wakeups import RUN_TASK, make_celery
from workers.config.settings import load_settings
from workers.store.broker_errors import BROKER_DOWN, describe_outage
from workers.store.jobs import JobStore

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
PASSWORD = "a-password-that-nobody-else-may-see"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Certificate:
    return make_certificate(folder, "authority")


@pytest.fixture(scope="module")
def other_authority(folder: Path) -> Certificate:
    return make_certificate(folder, "stranger")


@pytest.fixture(scope="module")
def server(folder: Path, authority: Certificate) -> Certificate:
    return make_certificate(folder, "server", authority)


@pytest.fixture
def front(server: Certificate, broker: EmbeddedBroker, url: str) -> Iterator[TlsFront]:
    with tls_front(server, broker.socket) as running:
        yield running


def ask_store(url: str) -> str:
    """Return the outage that the store sees; empty if there is none."""

    async def ask() -> str:
        store = JobStore(url)
        try:
            await store.check_broker()
        except BROKER_DOWN as error:
            return describe_outage(error)
        finally:
            await store.close()
        return ""

    return asyncio.run(ask())


def ask_celery(url: str) -> str:
    """Return the error of a sender of wake-ups; empty if the message arrived."""
    app = make_celery(load_settings(redis_url=url))
    try:
        app.send_task(RUN_TASK, args=["job_1"], queue="interactive", retry=False)
    except OperationalError as error:
        return str(error)
    finally:
        app.close()
    return ""


def address(front: TlsFront, *options: str, host: str = "localhost") -> str:
    return f"rediss://default:{PASSWORD}@{host}:{front.port}/0?{'&'.join(options)}"


def test_both_connect_where_the_authority_is_known(front: TlsFront, authority: Certificate, url: str) -> None:
    there = address(front, f"ssl_ca_certs={authority.file}")
    assert (ask_store(there), ask_celery(there)) == ("", "")
    with redis.Redis.from_url(url) as client:
        assert client.llen("interactive") == 1
    assert PASSWORD.encode() in front.received


@pytest.mark.parametrize("known", ["no authority", "another authority", "the system's authorities alone"])
def test_neither_sends_a_byte_to_a_server_with_an_unknown_certificate(
    front: TlsFront, other_authority: Certificate, known: str
) -> None:
    options = {
        "no authority": [],
        "another authority": [f"ssl_ca_certs={other_authority.file}"],
        "the system's authorities alone": ["ssl_cert_reqs=required"],
    }[known]
    there = address(front, *options)
    assert "the broker's certificate is refused" in ask_store(there)
    assert "CERTIFICATE_VERIFY_FAILED" in ask_celery(there)
    assert front.received == b""


def test_neither_sends_a_byte_to_a_server_with_the_certificate_of_another_host(
    folder: Path, authority: Certificate, broker: EmbeddedBroker, url: str
) -> None:
    with tls_front(make_certificate(folder, "other.test", authority), broker.socket) as front:
        there = address(front, f"ssl_ca_certs={authority.file}")
        assert "the broker's certificate is refused: Hostname mismatch" in ask_store(there)
        assert "CERTIFICATE_VERIFY_FAILED" in ask_celery(there)
        assert front.received == b""
        there = address(front, f"ssl_ca_certs={authority.file}", "ssl_check_hostname=false")
        assert (ask_store(there), ask_celery(there)) == ("", "")


def test_both_connect_to_anybody_if_the_url_says_so(front: TlsFront) -> None:
    there = address(front, "ssl_cert_reqs=none")
    assert (ask_store(there), ask_celery(there)) == ("", "")


def test_both_show_the_certificate_of_a_client(
    folder: Path, authority: Certificate, server: Certificate, broker: EmbeddedBroker, url: str
) -> None:
    client = make_certificate(folder, "client", authority)
    with tls_front(server, broker.socket, client_authority=authority.file) as front:
        trusted = f"ssl_ca_certs={authority.file}"
        there = address(front, trusted, f"ssl_certfile={client.file}", f"ssl_keyfile={client.key}")
        assert (ask_store(there), ask_celery(there)) == ("", "")
        there = address(front, trusted)
        assert ask_store(there) != ""
        assert ask_celery(there) != ""


def test_a_plain_connection_to_a_port_with_tls_fails_in_both(front: TlsFront) -> None:
    plain = f"redis://:{PASSWORD}@localhost:{front.port}/0"
    assert ask_store(plain) != ""
    assert ask_celery(plain) != ""
    assert front.received == b""
