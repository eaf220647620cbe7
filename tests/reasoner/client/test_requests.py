"""Requests built by the client, and its handling of unusual addresses, ids and responses."""

from __future__ import annotations

from urllib.parse import unquote

import httpx
import pytest

from reasoner.client import AsyncClient, Client, ServiceError


@pytest.mark.parametrize("name", ["../keys", "..", "x/cancel", "x?wait=60", "x#y", "\x01", "é", "%2e%2e"])
def test_an_id_is_always_one_path_segment(name: str) -> None:
    paths: list[bytes] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return httpx.Response(404, json={"detail": "there is no such thing"})

    client = Client("http://127.0.0.1", transport=httpx.MockTransport(refuse))
    calls = [client.get, client.delete, client.cancel, client.tree, client.batch, client.revoke_key, client.wait]
    for call in calls:
        with pytest.raises(ServiceError, match="no such thing"):
            call(name)
    ends = ["", "", "/cancel", "/tree", "", "", "/events"]
    for path, end in zip(paths, ends, strict=True):
        kind, _, rest = path.decode().removeprefix("/v1/").partition("/")
        given = rest.partition("?starting_after")[0].removesuffix(end)
        assert kind in ("jobs", "batches", "keys")
        assert unquote(given) == name
        assert not set("/?#") & set(given)


def test_export_yields_the_lines_unchanged() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        assert dict(request.url.params) == {"since": "5.0", "journal": "true"}
        return httpx.Response(200, content=b'{"id":"a"}\n{"id":"b"}\n')

    with Client("http://service", transport=httpx.MockTransport(respond)) as client:
        assert list(client.export(since=5.0, journal=True)) == ['{"id":"a"}', '{"id":"b"}']


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_malformed_address_or_key_is_refused_immediately(client: type[Client | AsyncClient]) -> None:
    with pytest.raises(ServiceError, match="is not the address of a service"):
        client("127.0.0.1:8000")
    with pytest.raises(ServiceError, match="printable ASCII"):
        client("http://127.0.0.1", "two words")


def test_values_that_json_cannot_express_are_refused_before_sending() -> None:
    client = Client("http://service", transport=httpx.MockTransport(lambda _: httpx.Response(500)))
    with pytest.raises(ServiceError, match="cannot be written as JSON") as refused:
        client.submit({"problem": "?", "confidence": float("nan")})
    assert refused.value.status == 422


def test_an_error_without_problem_details_names_the_status_and_the_address() -> None:
    client = Client("http://service", transport=httpx.MockTransport(lambda _: httpx.Response(418, text="?")))
    with pytest.raises(ServiceError, match=r"HTTP 418 from http://service/v1/jobs/job_1"):
        client.get("job_1")


def test_no_events_follow_the_last_one_of_an_ended_job() -> None:
    with Client("http://service", transport=httpx.MockTransport(lambda _: httpx.Response(204))) as client:
        assert list(client.events("job_1", after=7)) == []


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
