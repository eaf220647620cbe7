"""The API reference at ``/docs`` in a browser."""

from __future__ import annotations

import json
import re

from playwright.sync_api import Browser, expect

from tests.e2e.dashboard.service import (
    JOB,
    WAIT,
    Service,
    expect_count,
    open_page,
)


def test_the_reference_executes_calls_without_requests_to_other_hosts(browser: Browser, service: Service) -> None:
    with open_page(browser, f"{service.url}/docs", title="Reasoner: the HTTP interface", dark=True) as page:
        operations = [call for item in service.get("/openapi.json")["paths"].values() for call in item]
        expect_count(page.locator(".opblock"), len(operations))
        job = page.locator(".opblock-post", has=page.get_by_text("Submit a job", exact=True))
        job.locator(".opblock-summary-control").click()
        job.locator("textarea").fill(json.dumps(JOB))
        job.locator("button.execute").click()
        expect(job.locator(".live-responses-table .response .response-col_status")).to_have_text(
            re.compile("202"), timeout=WAIT
        )
        assert len(service.get("/v1/jobs")["data"]) == 1
        page.locator("button.authorize").first.click()
        expect(page.locator(".dialog-ux input")).to_be_visible(timeout=WAIT)
