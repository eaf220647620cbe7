"""The OpenAPI document has an example for every call, each valid for its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from api.app import examples
from api.app.app import create_app
from workers.config.settings import load_settings

DOCUMENT: dict[str, Any] = create_app(load_settings()).openapi()
Call = tuple[str, dict[str, Any]]
CALLS: list[Call] = [
    (f"{method.upper()} {path}", operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]
each_call = pytest.mark.parametrize("call", CALLS, ids=[name for name, _ in CALLS])


def check(value: Any, schema: dict[str, Any]) -> None:
    Draft202012Validator(schema | {"components": DOCUMENT["components"]}).validate(value)


def contents(call: Call) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for status, answer in call[1]["responses"].items():
        for kind, content in answer.get("content", {}).items():
            yield status, kind, content


@each_call
def test_every_response_has_an_example_of_its_schema(call: Call) -> None:
    for status, kind, content in contents(call):
        assert "example" in content, (status, kind)
        if kind.endswith("json"):
            check(content["example"], content["schema"])
        else:
            assert isinstance(content["example"], str)


@each_call
def test_every_body_has_examples_of_its_schema(call: Call) -> None:
    for content in call[1].get("requestBody", {}).get("content", {}).values():
        assert content["examples"]
        for example in content["examples"].values():
            assert example["summary"]
            check(example["value"], content["schema"])


@each_call
def test_every_path_parameter_has_an_example_and_every_call_a_summary(call: Call) -> None:
    parameters = [each for each in call[1].get("parameters", ()) if each["in"] == "path"]
    assert [each["name"] for each in parameters if each["example"] is None] == []
    assert call[1]["summary"]


@each_call
def test_errors_are_described_under_their_media_type(call: Call) -> None:
    ((_, kind, _),) = [one for one in contents(call) if one[0] == "default"]
    schema = call[1]["responses"]["default"]["content"][kind]["schema"]
    is_clients = all(part["$ref"].endswith("ErrorDocument") for part in schema.get("anyOf", [schema]))
    assert kind == ("application/json" if is_clients else "application/problem+json")


def test_every_example_belongs_to_an_existing_call() -> None:
    assert set(examples.ANSWERS) | set(examples.BODIES) <= {name for name, _ in CALLS}


async def test_the_body_examples_are_accepted(client: httpx.AsyncClient) -> None:
    for path in ("/v1/jobs", "/v1/select"):
        for example in examples.BODIES[f"POST {path}"].values():
            response = await client.post(path, json=example["value"])
            assert response.status_code == 202, response.text
