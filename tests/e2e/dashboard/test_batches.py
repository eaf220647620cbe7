"""Batches on the dashboard: progress, the shared budget, their jobs, and their files."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from playwright.sync_api import Browser, expect

from tests.e2e.dashboard.service import JOB, WAIT, Service, expect_count, expect_text, open_page


def post_batch(service: Service, body: dict[str, Any]) -> str:
    return str(httpx.post(f"{service.url}/v1/batches", json=body, timeout=30).raise_for_status().json()["id"])


def test_a_batch_shows_its_progress_its_budget_and_each_job(browser: Browser, service: Service) -> None:
    jobs = [{name: value for name, value in JOB.items() if name != "budget"} | {"problem": f"{n}?"} for n in range(3)]
    batch_id = post_batch(service, {"jobs": jobs, "budget": {"tokens": 900}, "metadata": {"course": "numbers"}})
    service.open_gate()
    with open_page(browser, f"{service.url}/#batches") as page:
        expect(page.locator("#batch-list .title")).to_have_text("numbers", timeout=WAIT)
        expect(page.locator("#batch .key").first).to_contain_text("3 queued", timeout=WAIT)
        first = service.get(f"/v1/batches/{batch_id}")["jobs"][0]["id"]
        service.work(first).result(60)
        expect(page.locator("#batch .key").first).to_contain_text("1 completed", timeout=WAIT)
        batch = service.get(f"/v1/batches/{batch_id}")
        spent = batch["usage"]["output_tokens"]
        granted = sum(job["granted"] for job in batch["jobs"] if job["status"] == "queued")
        assert spent + granted + batch["unassigned"] == 900
        expect(page.locator("#batch .key").nth(1)).to_have_text(
            f"{spent} spent{granted} granted to jobs{batch['unassigned']} left to grantof 900 tokens",
            timeout=WAIT,
        )
        row = page.locator("#batch tbody tr").first
        expect(row).to_contain_text("completed", timeout=WAIT)
        expect(row.locator("code")).to_have_text("7", timeout=WAIT)
        row.locator("a").click()
        expect_text(page.locator("#question"), "0?")
        assert page.url.endswith(f"#{first}")
        page.go_back()
        page.locator("#batch [data-action=cancel]").click()
        page.click("#sure-dialog [type=submit]")
        expect(page.locator("#batch header .status")).to_have_text("cancelled", timeout=WAIT)
        assert service.get(f"/v1/batches/{batch_id}")["status"] == "cancelled"


def test_a_batch_of_a_file_shows_refused_lines_and_hands_out_its_files(browser: Browser, service: Service) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/jobs", "body": body}
        for number, body in enumerate([JOB, JOB | {"budget": {"tokens": 0}}])
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    upload = httpx.post(
        f"{service.url}/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}, timeout=30
    )
    spec = {"input_file_id": upload.json()["id"], "endpoint": "/v1/jobs", "completion_window": "24h"}
    batch_id = post_batch(service, spec)
    with open_page(browser, f"{service.url}/#{batch_id}") as page:
        expect(page.locator("#batch .facts").first).to_contain_text("lines of file-", timeout=WAIT)
        expect(page.locator("#batch .key").first).to_contain_text("1 queued", timeout=WAIT)
        [job] = service.get("/v1/jobs")["data"]
        service.open_gate()
        service.work(job["id"]).result(60)
        expect(page.locator("#batch header .status")).to_have_text("completed", timeout=WAIT)
        expect(page.locator("#batch .tile").first).to_contain_text("1 answered, 1 without an answer", timeout=WAIT)
        with page.expect_download() as download:
            page.get_by_role("button", name="Errors").click()
        assert json.loads(download.value.path().read_text())["custom_id"] == "1"


def test_without_batches_the_page_says_how_to_make_one_and_an_unknown_batch_is_named(
    browser: Browser, service: Service
) -> None:
    with open_page(browser, f"{service.url}/#batches") as page:
        expect(page.locator("#nobatches")).to_contain_text("POST /v1/batches", timeout=WAIT)
        gone = "batch_" + "0" * 32
        page.goto(f"{service.url}/#{gone}")
        expect(page.locator("#batch .refused")).to_contain_text(re.compile(f"There is no batch {gone}"), timeout=WAIT)
        expect_count(page.locator("#batch-list li"), 0)
