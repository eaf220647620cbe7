"""Webhooks are accepted only if they can be signed and their target is allowed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.cli.test_jobs import sent
from tests.api.conftest import serving
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings

SECRET = "whsec_" + "A" * 43 + "="


@pytest.mark.parametrize(
    ("configured", "webhook", "message"),
    [
        ({}, "https://example.com/hook", "cannot sign webhooks"),
        ({"webhook_secret": SECRET}, "http://example.com/hook", "only https://"),
        ({"webhook_secret": SECRET}, "https://127.0.0.1/hook", "not a public address"),
        ({"webhook_secret": SECRET}, "https://example.com/" + "x" * 2048, "2048"),
        ({"webhook_secret": SECRET}, "", "names no host"),
        ({"webhook_secret": SECRET}, 7, "string"),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
async def test_an_invalid_webhook_is_refused_with_the_reason(
    settings: Settings, configured: dict[str, Any], webhook: Any, message: str, batch: bool
) -> None:
    settings = settings.model_validate(settings.model_dump() | configured)
    async with serving(settings, ScriptedEngine()) as client:
        job = {"problem": "1 + 1?", "webhook": webhook}
        body = {"jobs": [job], "budget": {"tokens": 100}} if batch else job
        response = await client.post("/v1/batches" if batch else "/v1/jobs", json=body)
    if batch:
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "jobs.0.webhook")
        assert message in error["message"]
        return
    assert response.status_code == 422, response.text
    (problem,) = response.json()["errors"]
    assert problem["field"] == "webhook"
    assert message in problem["message"]


async def test_a_webhook_is_echoed_and_not_delivered_before_the_job_ends(settings: Settings) -> None:
    settings = settings.model_validate(settings.model_dump() | {"webhook_secret": SECRET})
    async with serving(settings, ScriptedEngine()) as client:
        job = (await client.post("/v1/jobs", json={"problem": "?", "webhook": "https://example.com/hook"})).json()
        assert (job["spec"]["webhook"], job["delivery"]) == ("https://example.com/hook", None)
        ended: httpx.Response = await client.post(f"/v1/jobs/{job['id']}/cancel")
    assert ended.json()["delivery"] == {"state": "pending", "attempts": 0, "error": None}


def test_the_command_line_submits_a_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent(monkeypatch, "--webhook", "https://example.com/hook")["webhook"] == "https://example.com/hook"
