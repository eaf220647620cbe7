"""Generated requests to the API: responses match the OpenAPI document, without any 500 or hang."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import load_all_checks
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

from api.app.app import create_app
from tests.fuzz.service import served
from tests.workers.fixtures import broker
from workers.broker.embedded import EmbeddedBroker
from workers.config.settings import load_settings

__all__ = ["broker"]
KEY = "a-key-of-many-characters"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
EXAMPLES = 6
"""The number of generated requests per route, besides those that cover its parameters one by one."""
PATIENCE = 60.0

load_all_checks()
LEFT_OUT = [positive_data_acceptance]
"""Left out because requests allowed by a schema may still be invalid, such as a problem beside messages: 422 gives the
reason.
"""

REFUSALS = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]
"""The possible statuses for a request that the schema forbids; 413 because one with too many parts may be too large."""

schema = schemathesis.openapi.from_dict(
    create_app(load_settings()).openapi(),
    config=SchemathesisConfig.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}}),
)


@pytest.fixture(scope="module")
def service(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("service")
    configured = load_settings(redis_url=broker.url, data_dir=folder, api_keys=KEY)
    with (
        pytest.MonkeyPatch.context() as patch,
        served(configured, patch) as url,
        httpx.Client(base_url=url, headers=AUTHORIZATION, timeout=PATIENCE) as client,
    ):
        yield client


@pytest.mark.timeout(600)
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_response_matches_the_openapi_document(case: schemathesis.Case, service: httpx.Client) -> None:
    _aim(case, service)
    case.call_and_validate(str(service.base_url), headers=AUTHORIZATION, timeout=PATIENCE, excluded_checks=LEFT_OUT)


def _aim(case: schemathesis.Case, service: httpx.Client) -> None:
    """Use existing ids in every other request, since generated ids match nothing."""
    for name, value in (case.path_parameters or {}).items():
        if zlib.crc32(repr((value, case.query, case.headers)).encode()) % 2:
            case.path_parameters[name] = _made(name, service)


def _made(parameter: str, service: httpx.Client) -> str:
    job: dict[str, Any] = {"problem": "1 + 1?", "strategy": {"name": "greedy"}, "seed": 1}
    message = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "1 + 1?"}]}
    if parameter == "model":
        return "policy"
    if parameter == "file_id":
        parts = {"purpose": (None, "batch"), "file": ("lines.jsonl", b"{}")}
        return str(service.post("/v1/files", files=parts).raise_for_status().json()["id"])
    path, body = {
        "job_id": ("/v1/jobs", job),
        "batch_id": ("/v1/batches", {"jobs": [job], "budget": {"tokens": 100}}),
        "message_batch_id": ("/v1/messages/batches", {"requests": [{"custom_id": "c", "params": message}]}),
        "key_id": ("/v1/keys", {"name": "k", "owner": "o"}),
        "response_id": ("/v1/responses", {"model": "policy", "input": "1 + 1?", "background": True}),
    }[parameter]
    return str(service.post(path, json=body).raise_for_status().json()["id"])
