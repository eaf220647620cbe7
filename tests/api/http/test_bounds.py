"""Every number and list in a request has bounds in the schema, so that nothing behind the API gets an unbounded one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from api.app.app import create_app
from engine.server.schema import CompletionBody, ScoreBody
from reasoner.strategies.registry import STRATEGIES
from tests.specs import build_spec
from workers.config.settings import load_settings

Schema = dict[str, Any]

ENGINE_CHECKS = {"prompt", "generated", "stop_token_ids", "token_ids", "parts", "read", "tokens"}
"""Lists of token ids and the like, which the engine checks against the model's vocabulary and context."""


def unbounded(schema: Schema, defs: Schema, path: str = "", seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the paths of numbers without two bounds, and of lists without a maximum length."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from unbounded(defs[name], defs, path, seen | {name})
        return
    if schema.get("type") in ("integer", "number") and not {"enum", "const"} & schema.keys():
        low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
        if not (low & schema.keys() and high & schema.keys()):
            yield path
    if {"minimum", "maximum"} <= schema.keys():
        return
    if schema.get("type") == "array" and "maxItems" not in schema:
        yield path
    for name, part in schema.get("properties", {}).items():
        yield from unbounded(part, defs, f"{path}.{name}", seen)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from unbounded(schema[name], defs, f"{path}[]", seen)
    for kind in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for part in schema.get(kind, ()):
            yield from unbounded(part, defs, path, seen)


def test_every_number_and_list_of_the_rest_api_is_bounded() -> None:
    document = create_app(load_settings()).openapi()
    defs = document["components"]["schemas"]
    found = set()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            call = f"{method.upper()} {path}"
            for parameter in operation.get("parameters", ()):
                found |= set(unbounded(parameter["schema"], defs, f"{call}?{parameter['name']}"))
            for content in operation.get("requestBody", {}).get("content", {}).values():
                found |= set(unbounded(content["schema"], defs, call))
    assert sorted(found) == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_number_of_a_strategy_is_bounded(name: str) -> None:
    schema = STRATEGIES[name].params.model_json_schema()
    assert not set(unbounded(schema, schema.get("$defs", {}), name))


@pytest.mark.parametrize("body", [CompletionBody, ScoreBody])
def test_every_number_of_the_engines_api_is_bounded(body: type[CompletionBody | ScoreBody]) -> None:
    schema = body.model_json_schema()
    found = set(unbounded(schema, schema["$defs"]))
    assert not {path for path in found if not ENGINE_CHECKS & set(path.replace("[]", "").split("."))}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 1 << 63),
        ("top_k", -1),
        ("max_tokens", 1 << 63),
        ("temperature", 1e300),
        ("min_p", 1.5),
    ],
)
def test_an_out_of_range_number_is_refused_with_its_field(field: str, value: float) -> None:
    with pytest.raises(ValidationError) as refusal:
        build_spec({"problem": "?", "sampling": {field: value}})
    assert refusal.value.errors()[0]["loc"] == ("sampling", field)


async def test_the_openapi_document_states_the_limit(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/jobs", json={"problem": "?", "sampling": {"top_k": 1 << 63}})
    assert answer.status_code == 422
    assert "sampling.top_k" in answer.json()["detail"]
    assert "1000000" in answer.json()["detail"]
