"""A service that is not ready names the parts that it waits for."""

from __future__ import annotations

from api.roles.supervisor import describe_missing


def test_the_broker_is_named_with_its_address_and_the_reason_but_without_its_password() -> None:
    errors = [{"field": "broker", "message": "it does not answer"}, {"field": "engine", "message": "away"}]
    line = describe_missing(errors, "redis://user:a-secret@10.0.0.7:6380/2")
    assert line == "waiting for the engine; waiting for the broker at redis://10.0.0.7:6380/2: it does not answer"
