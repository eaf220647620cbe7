"""Proxies of the environment: never for this machine, for other servers where one is set, with any ``NO_PROXY``."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest
import requests

from engine.protocol.types import EngineUnavailable, InvalidRequest
from engine.remote.http import HttpEngine
from engine.remote.proxies import InvalidProxy, client_options, find_proxy, find_proxy_url
from reasoner.client import Client, ServiceError
from workers.config.settings import load_settings
from workers.config.types import ConfigError

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 64}]}


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def all_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://proxy.test:3128")
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy.test:1080")


@pytest.mark.usefixtures("all_set")
@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST",
        "localhost.",
        "api.localhost",
        "127.0.0.1",
        "127.1.2.3",
        "127.1",
        "0x7f.1",
        "2130706433",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "[::]",
        socket.gethostname(),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("port", ["", ":8000"])
def test_no_request_to_this_machine_has_a_proxy(scheme: str, host: str, port: str) -> None:
    url = f"{scheme}://{host}{port}/v1"
    assert find_proxy(url) is None
    with httpx.Client(**client_options(url)) as client:
        assert client._mounts == {}


@pytest.mark.usefixtures("all_set")
@pytest.mark.parametrize("url", ["unix:///a.sock", "unix:///proxy.test/a.sock"])
def test_no_unix_socket_has_a_proxy(url: str) -> None:
    assert find_proxy(url) is None


@pytest.mark.parametrize("host", ["api.test", "10.0.0.1", "[fd00::1]", "localhost.test", "127.0.0.1.test", "1.2.3.4"])
@pytest.mark.parametrize(
    ("variables", "http", "https"),
    [
        ({}, None, None),
        ({"HTTP_PROXY": "http://p:1"}, "http://p:1", None),
        ({"https_proxy": "http://p:1"}, None, "http://p:1"),
        ({"ALL_PROXY": "http://p:1"}, "http://p:1", "http://p:1"),
        ({"all_proxy": "p:1"}, "http://p:1", "http://p:1"),
        ({"HTTP_PROXY": "http://p:1", "http_proxy": "http://q:1"}, "http://q:1", None),
        ({"HTTPS_PROXY": "http://p:1", "ALL_PROXY": "socks5://q:1"}, "socks5://q:1", "http://p:1"),
        ({"HTTPS_PROXY": "https://u:a%40b@p:1"}, None, "https://u:a%40b@p:1"),
        ({"HTTPS_PROXY": " http://p:1 "}, None, "http://p:1"),
        ({"HTTPS_PROXY": ""}, None, None),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "*"}, None, None),
        ({"ALL_PROXY": "http://p:1", "no_proxy": "unrelated.test, 9.9.9.9"}, "http://p:1", "http://p:1"),
    ],
)
def test_other_servers_have_the_proxy_of_the_scheme_or_of_all(
    monkeypatch: pytest.MonkeyPatch, host: str, variables: dict[str, str], http: str | None, https: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (find_proxy_url(f"http://{host}:8000/v1"), find_proxy_url(f"https://{host}/v1")) == (http, https)


@pytest.mark.parametrize(
    ("no_proxy", "excluded", "others"),
    [
        ("api.test", ["api.test", "eu.api.test", "API.test"], ["xapi.test", "test", "api.test.org"]),
        (".api.test", ["api.test", "eu.api.test"], ["xapi.test"]),
        ("*.api.test", ["eu.api.test"], ["xapi.test"]),
        ("api.test:8000", ["api.test:8000"], ["api.test:8001", "api.test"]),
        ("10.0.0.0/8", ["10.1.2.3", "10.1.2.3:80"], ["11.0.0.1", "10.test"]),
        ("10.1.2.3", ["10.1.2.3"], ["10.1.2.4", "110.1.2.3"]),
        ("fd00::/8", ["[fd00::1]", "[fd12:3::4]:80"], ["[2001:db8::1]", "fd00.test"]),
        ("fd00::1", ["[fd00::1]", "[fd00:0::1]"], ["[fd00:dead::2]"]),
        ("[fd00::1]", ["[fd00::1]"], ["[fd00:dead::2]"]),
        ("[fd00::1]:80", ["[fd00::1]:80"], ["[fd00::1]:81"]),
        ("a.test,fd00::/8 , b.test", ["a.test", "b.test", "[fd00::1]"], ["c.test"]),
        ("a.test b.test", ["a.test", "b.test"], ["c.test"]),
        ("fd00::/999,[,]:x,//,:,.,*.,10.0.0.0/99,a b%,a.test", ["a.test"], ["api.test", "10.0.0.1", "[fd00::1]"]),
        ("https://a.test", ["a.test"], ["b.test"]),
        (",,", [], ["a.test"]),
    ],
)
def test_entries_of_no_proxy(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, excluded: list[str], others: list[str]
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://p:1")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert [host for host in excluded if find_proxy(f"http://{host}/v1")] == []
    assert [host for host in others if find_proxy(f"http://{host}/v1") is None] == []


@pytest.mark.parametrize("no_proxy", ["a.test", ".a.test", "a.test:80,b.test", "*", "10.1.2.3", "10.0.0.0/8", ""])
@pytest.mark.parametrize("host", ["a.test", "x.a.test", "xa.test", "b.test", "10.1.2.3", "10.1.2.4"])
def test_names_and_networks_are_read_as_requests_reads_them(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, host: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://p:1")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    expected = requests.utils.should_bypass_proxies(f"http://{host}:80/", no_proxy=None)
    assert (find_proxy(f"http://{host}:80/") is None) == expected


@pytest.mark.parametrize(
    "value", ["ftp://p:1", "socks4://p:1", "socks://p:1", "http://", "http://:80", "http://p:x", "http://u:s3cret@p:0"]
)
def test_an_unusable_proxy_is_refused_in_a_line_without_its_login(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", value)
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (InvalidProxy, lambda: find_proxy("https://api.test")),
        (InvalidRequest, lambda: HttpEngine("https://api.test")),
        (ServiceError, lambda: Client("https://api.test")),
        (ConfigError, lambda: load_settings(engine_url="https://api.test", prm="none", model="m")),
    ]
    for error, call in calls:
        with pytest.raises(error, match="HTTPS_PROXY") as refused:
            call()
        assert "\n" not in str(refused.value)
        assert "s3cret" not in str(refused.value)
    load_settings(engine_url="http://127.0.0.1:1", prm="none", model="m")


class RecordingProxy:
    """An HTTP proxy that answers what it is asked for itself, and refuses tunnels with a page."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, client.makefile("rb") as lines:
            request = lines.readline().decode()
            while lines.readline().strip():
                pass
            self.asked.append(" ".join(request.split()[:2]))
            if request.startswith("CONNECT"):
                status, kind, body = "403 Forbidden", "text/html", b"<html>no</html>"
            else:
                known = urlsplit(request.split()[1]).path == "/v1/models"
                status, kind = ("200 OK", "application/json") if known else ("404 Not Found", "application/json")
                body = json.dumps(MODELS if known else {}).encode()
            head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)


@pytest.fixture
def proxy() -> Iterator[RecordingProxy]:
    running = RecordingProxy()
    yield running
    running.close()


@pytest.fixture
async def hosted(proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpEngine]:
    monkeypatch.setenv("HTTP_PROXY", f"http://user:s3cret@127.0.0.1:{proxy.port}")
    engine = HttpEngine("http://engine.test:8000", dialect="vllm", should_wait=False)
    yield engine
    await engine.close()


async def test_a_hosted_engine_is_called_through_the_proxy(hosted: HttpEngine, proxy: RecordingProxy) -> None:
    assert [model.id for model in await hosted.models()] == ["m"]
    assert "GET http://engine.test:8000/v1/models" in proxy.asked


async def test_a_proxy_that_refuses_is_named_without_its_login(
    proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:s3cret@127.0.0.1:{proxy.port}")
    engine = HttpEngine("https://engine.test", dialect="openai", should_wait=False)
    with pytest.raises(EngineUnavailable, match=f"through the proxy http://127.0.0.1:{proxy.port}.*403") as refused:
        await engine.models()
    assert "s3cret" not in str(refused.value)
    assert proxy.asked[0] == "CONNECT engine.test:443"
    await engine.close()


def test_a_service_elsewhere_is_called_through_the_proxy(
    proxy: RecordingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
    with Client("http://service.test") as client:
        assert client.models() == MODELS
    with Client("http://127.0.0.1:1") as client, pytest.raises(ServiceError, match="no service answers"):
        client.models()
    assert proxy.asked == ["GET http://service.test/v1/models"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # httpcore leaves the socket to gc
async def test_a_socks_proxy_gets_the_name_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(64)
                client.sendall(b"\x05\x00")
                asked.append(client.recv(256))
                client.sendall(b"\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00")  # not allowed

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        monkeypatch.setenv("ALL_PROXY", f"socks5://127.0.0.1:{listener.getsockname()[1]}")
        engine = HttpEngine("https://engine.test", dialect="openai", should_wait=False)
        with pytest.raises(EngineUnavailable, match="through the proxy socks5://"):
            await engine.models()
        await engine.close()
        thread.join()
        gc.collect()
    assert asked[0] == b"\x05\x01\x00\x03\x0bengine.test\x01\xbb"


def test_the_exporter_of_traces_follows_the_same_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.telemetry.tracing import _make_session

    monkeypatch.setenv("HTTP_PROXY", "http://p:1")
    assert _make_session("http://127.0.0.1:4318").proxies == {}
    assert not _make_session("http://127.0.0.1:4318").trust_env
    assert _make_session("http://collector.test:4318").proxies["http"] == "http://p:1"
    assert urllib.request.getproxies()["http"] == "http://p:1"
