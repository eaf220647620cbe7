"""Delivery of webhooks: signatures, retries, and no requests into the private network."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from reasoner.jobs.job import JobError
from tests.workers.store.helpers import RESULT, SPEC, claim, expire
from tests.workers.webhooks.receiver import KEY, SECRET, Receiver, served
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError, decode_webhook_secret
from workers.store.jobs import JobStore
from workers.webhooks import http
from workers.webhooks.deliver import PAUSES, deliver, sign
from workers.webhooks.http import ForbiddenAddress, SendFailed, check_address, post


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with served(Receiver()) as server:
        yield server


@pytest.fixture
def settings(url: str, tmp_path: Path) -> Settings:
    return load_settings(redis_url=url, data_dir=tmp_path, webhook_secret=SECRET, webhook_allow=["127.0.0.1"])


async def ended(store: JobStore, address: str, owner: str = "me") -> str:
    """Store a job with a webhook that has ended."""
    spec = SPEC | {"webhook": address, "metadata": {"course": "½"}}
    job, _ = await store.submit(spec, owner=owner, queue_cap=10)
    held = await claim(store, job["id"])
    assert (await store.get(job["id"]))["delivery"] is None
    await store.finish(held, "completed", result=RESULT)
    return str(job["id"])


def its_time_has_come(url: str, job_id: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.hset(f"reasoner:job:{job_id}", "webhook:at", 1)
        client.zadd("reasoner:webhooks", {job_id: 1})


async def delivery(store: JobStore, job_id: str) -> tuple[str, int, str | None]:
    found = (await store.get(job_id))["delivery"]
    return found["state"], found["attempts"], found["error"]


def test_the_signature_equals_the_example_of_the_standard() -> None:
    secret = decode_webhook_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_the_end_of_a_job_is_delivered_once_and_signed(
    store: JobStore, settings: Settings, receiver: Receiver
) -> None:
    job_id = await ended(store, receiver.url)
    assert await store.reap(3) == [(job_id, "webhooks")]
    assert await store.reap(3) == []
    for _ in range(2):  # the second message does nothing
        await deliver(job_id, store=store, settings=settings)
    ((path, headers, body),) = receiver.got
    assert path == "/ended?who=me"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 300
    told, job = json.loads(body), await store.get(job_id)
    assert told["type"] == "job.completed"
    assert told["data"]["result"] == job["result"]
    assert (told["data"]["id"], told["data"]["metadata"]) == (job_id, {"course": "½"})
    assert await delivery(store, job_id) == ("delivered", 1, None)
    assert await store.reap(3) == []


async def test_an_owner_may_have_its_own_secret(store: JobStore, settings: Settings, receiver: Receiver) -> None:
    own = bytes(reversed(KEY))
    secrets = {"her": "whsec_" + base64.b64encode(own).decode()}
    settings = load_settings(**settings.model_dump() | {"webhook_secrets": secrets})
    for owner, key in (("her", own), ("him", KEY)):
        await deliver(await ended(store, receiver.url, owner), store=store, settings=settings)
        _, headers, body = receiver.got.pop()
        signed = sign(key, headers["webhook-id"], headers["webhook-timestamp"], body)
        assert headers["webhook-signature"] == signed


async def test_a_failed_delivery_is_retried_under_the_same_id_and_finally_fails(
    store: JobStore, settings: Settings, receiver: Receiver, url: str
) -> None:
    job_id = await ended(store, receiver.url)
    receiver.answers = [500] * (len(PAUSES) + 1)
    for attempt in range(1, len(PAUSES) + 1):
        await deliver(job_id, store=store, settings=settings)
        assert await delivery(store, job_id) == ("pending", attempt, "the answer was 500")
        await deliver(job_id, store=store, settings=settings)  # before it is due: a duplicate message changes nothing
        assert len(receiver.got) == attempt
        with redis.Redis.from_url(url) as client:
            pause = client.zscore("reasoner:webhooks", job_id) / 1000 - time.time()
        assert 0.7 * PAUSES[attempt - 1] - 5 < pause < 1.3 * PAUSES[attempt - 1]
        assert await store.reap(3) == []
        its_time_has_come(url, job_id)
        assert await store.reap(3) == [(job_id, "webhooks")]
    await deliver(job_id, store=store, settings=settings)
    assert await delivery(store, job_id) == ("failed", len(PAUSES) + 1, "the answer was 500")
    assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1
    its_time = await store.reap(3)
    assert its_time == []


async def test_a_delivery_whose_worker_died_is_retried_and_its_late_outcome_is_ignored(
    store: JobStore, settings: Settings, receiver: Receiver, url: str
) -> None:
    job_id = await ended(store, receiver.url)
    assert (await store.script("webhook_claim", job_id, 30_000, 7))[0] == "claimed"  # by a worker that dies
    await deliver(job_id, store=store, settings=settings)
    assert receiver.got == []
    its_time_has_come(url, job_id)
    assert await store.reap(3) == [(job_id, "webhooks")]
    await deliver(job_id, store=store, settings=settings)
    assert await delivery(store, job_id) == ("delivered", 2, None)
    assert await store.script("webhook_settle", job_id, 1, "pending", "", 0) == "lost"
    assert await delivery(store, job_id) == ("delivered", 2, None)


async def test_a_delivery_that_kills_its_workers_fails(
    store: JobStore, settings: Settings, receiver: Receiver, url: str
) -> None:
    job_id = await ended(store, receiver.url)
    for _ in range(len(PAUSES) + 1):
        assert (await store.script("webhook_claim", job_id, 30_000, len(PAUSES) + 1))[0] == "claimed"
        its_time_has_come(url, job_id)
    await deliver(job_id, store=store, settings=settings)
    assert receiver.got == []
    assert await delivery(store, job_id) == ("failed", len(PAUSES) + 1, "lost its worker")
    assert await store.reap(3) == []


async def test_a_lost_message_is_sent_again_when_the_queue_is_empty(store: JobStore, url: str) -> None:
    job_id = await ended(store, "https://example.com")
    assert await store.reap(3) == [(job_id, "webhooks")]
    with redis.Redis.from_url(url) as client:
        client.lpush("webhooks", "a message")
        its_time_has_come(url, job_id)
        assert await store.reap(3) == []  # the queued message may be that of this job
        client.delete("webhooks")
    its_time_has_come(url, job_id)
    assert await store.reap(3) == [(job_id, "webhooks")]


async def test_a_410_response_ends_the_delivery(store: JobStore, settings: Settings, receiver: Receiver) -> None:
    job_id = await ended(store, receiver.url)
    receiver.answers = [410]
    await deliver(job_id, store=store, settings=settings)
    assert await delivery(store, job_id) == ("failed", 1, "the answer was 410")


async def test_a_redirect_is_not_followed(store: JobStore, settings: Settings, receiver: Receiver) -> None:
    job_id = await ended(store, receiver.url)
    receiver.answers, receiver.headers = [302], {"Location": f"http://127.0.0.1:{receiver.port}/inside"}
    await deliver(job_id, store=store, settings=settings)
    assert await delivery(store, job_id) == ("pending", 1, "the answer was 302: redirects are not followed")
    assert [path for path, _, _ in receiver.got] == ["/ended?who=me"]


async def test_a_retried_job_delivers_only_its_second_end(
    store: JobStore, settings: Settings, receiver: Receiver, url: str
) -> None:
    job, _ = await store.submit(SPEC | {"webhook": receiver.url, "metadata": {}}, owner="me", queue_cap=10)
    job_id = job["id"]
    await store.finish(await claim(store, job_id), "failed", error=JobError(code="engine_error", message="no"))
    assert await delivery(store, job_id) == ("pending", 0, None)
    retried = await store.retry(job_id, queue_cap=10)
    assert retried["delivery"] is None
    await deliver(job_id, store=store, settings=settings)
    assert receiver.got == []
    await store.finish(await claim(store, job_id), "completed", result=RESULT)
    await deliver(job_id, store=store, settings=settings)
    assert [json.loads(body)["type"] for _, _, body in receiver.got] == ["job.completed"]


async def test_the_outcome_of_the_first_delivery_does_not_settle_the_second(
    store: JobStore, settings: Settings, receiver: Receiver
) -> None:
    job, _ = await store.submit(SPEC | {"webhook": receiver.url, "metadata": {}}, owner="me", queue_cap=10)
    job_id = job["id"]
    await store.finish(await claim(store, job_id), "failed", error=JobError(code="engine_error", message="no"))
    _, token, *_ = await store.script("webhook_claim", job_id, 30_000, 7)
    await store.retry(job_id, queue_cap=10)
    await store.cancel(job_id)
    assert await store.script("webhook_settle", job_id, token, "delivered", "", 0) == "lost"
    await deliver(job_id, store=store, settings=settings)
    assert [json.loads(body)["type"] for _, _, body in receiver.got] == ["job.cancelled"]


async def test_a_deleted_job_delivers_nothing(
    store: JobStore, settings: Settings, receiver: Receiver, url: str
) -> None:
    job_id = await ended(store, receiver.url)
    await store.delete(job_id)
    assert await store.reap(3) == []
    await deliver(job_id, store=store, settings=settings)
    assert receiver.got == []
    with redis.Redis.from_url(url) as client:
        assert not {key for key in client.keys("reasoner:*") if job_id.encode() in key}
        left = {
            key for key in client.keys("reasoner:*") if not key.startswith(b"reasoner:shares")
        }  # of owners, not of jobs
        assert {client.type(key) for key in left} <= {b"string", b"hash"}  # counters


async def test_a_worker_death_delivers_nothing_for_a_job_that_continues(store: JobStore, url: str) -> None:
    job, _ = await store.submit(SPEC | {"webhook": "https://example.com"}, owner="me", queue_cap=10)
    await claim(store, job["id"])
    expire(url, job["id"])
    assert await store.reap(3) == [(job["id"], "interactive")]


INSIDE = [
    "127.0.0.1",
    "10.1.2.3",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fd00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
]


@pytest.mark.parametrize("address", INSIDE)
async def test_private_addresses_are_refused_whether_literal_or_resolved(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(ForbiddenAddress, match="not a public address"):
        check_address(f"https://{host}/hook", ())

    async def looked_up(*_: object, **__: object) -> list[Any]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 443)),
            (family, socket.SOCK_STREAM, 6, "", (address, 443)),
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
    with pytest.raises(ForbiddenAddress, match=r"hooks\.example is not a public address"):
        await post("https://hooks.example/", b"", {}, allowed=())


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "localhost", "localhost."])
async def test_alternative_spellings_of_this_machine_are_refused(host: str) -> None:
    with pytest.raises((ForbiddenAddress, SendFailed)):
        await post(f"https://{host}/", b"", {}, allowed=())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://example.com/", "only https://"),
        ("ftp://example.com/", "only https://"),
        ("ftp://127.0.0.1/", "cannot be called"),
        ("https:///path", "names no host"),
        ("hooks", "names no host"),
        ("https://user:word@example.com/", "password"),
        ("https://exa mple.com/", "is not a host name"),
        (f"https://{'x' * 64}.com/", "is not a host name"),
        ("https://a..b/", "is not a host name"),
        (f"https://{'x.' * 127}com/", "is not a host name"),
        ("https://example.com:99999/", "no port 99999"),
        ("https://example.com:x/", "not an address"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(address: str, message: str) -> None:
    with pytest.raises(ForbiddenAddress, match=message):
        check_address(address, ["127.0.0.1"])


async def test_a_name_is_resolved_once_and_the_connection_goes_to_the_checked_address(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    asked: list[str] = []

    async def looked_up(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        where = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"  # DNS rebinding
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (where, port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
    await post(f"http://hooks.test:{receiver.port}/", b"{}", {}, allowed=["hooks.test"])
    assert [headers["host"] for _, headers, _ in receiver.got] == [f"hooks.test:{receiver.port}"]
    assert asked.count("hooks.test") == 1


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Return a certificate of ``hooks.test``, and its key."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=hooks.test"
    more = ["-addext", "subjectAltName=DNS:hooks.test", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *more], check=True, capture_output=True)
    return certificate, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_the_certificate_is_verified_for_the_name_of_a_pinned_address(
    monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def looked_up(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    server = Receiver()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with served(server):
        address = f"https://{{}}:{server.port}/"
        await post(address.format("hooks.test"), b"{}", {}, allowed=["hooks.test"])
        with pytest.raises(SendFailed, match=r"(?i)certificate"):
            await post(address.format("other.test"), b"{}", {}, allowed=["other.test"])
    assert [headers["host"] for _, headers, _ in server.got] == [f"hooks.test:{server.port}"]


async def test_a_server_that_never_responds_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TIMEOUT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(SendFailed, match=r"0\.2 s|Timeout"):
            await post(f"http://127.0.0.1:{silent.getsockname()[1]}/", b"", {}, allowed=["127.0.0.1"])


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")
    await post(receiver.url, b"{}", {}, allowed=["127.0.0.1"])
    assert len(receiver.got) == 1


def test_settings_reach_every_role_and_an_invalid_secret_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(webhook_secret=SECRET, webhook_secrets={"her": SECRET}, webhook_allow="A.test, 10.0.0.1")
    assert settings.webhook_allow == ("a.test", "10.0.0.1")
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings().model_dump() == settings.model_dump()
    assert base64.b64encode(KEY).decode() not in repr(settings)
    for wrong in ("whsec_c2hvcnQ=", "whsec_" + "!" * 40, base64.b64encode(KEY).decode()):
        with pytest.raises(ConfigError, match="24 to 64 random bytes") as caught:
            load_settings(webhook_secret=wrong)
        assert wrong not in str(caught.value)
