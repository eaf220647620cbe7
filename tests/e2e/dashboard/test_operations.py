"""The service on the dashboard: queue, waits, rates, engines, usage, keys, and what a key may not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, expect
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.dashboard.service import WAIT, Service, expect_count, open_page
from workers.config.settings import load_settings

ADMIN = "a-key-of-this-very-test"


def test_the_service_shows_its_queue_engines_usage_and_keys(browser: Browser, service: Service) -> None:
    job_id = service.submit()
    service.submit()
    service.open_gate()
    service.work(job_id).result(60)
    usage = service.get(f"/v1/jobs/{job_id}")["usage"]
    with open_page(browser, f"{service.url}/#service") as page:
        tiles = page.locator("#load .tile")
        expect(tiles.nth(0)).to_contain_text("queued1", timeout=WAIT)
        expect(tiles.nth(1)).to_contain_text("running0", timeout=WAIT)
        expect(tiles.nth(2)).to_contain_text("median; 95 % below", timeout=WAIT)
        expect(tiles.nth(3)).to_contain_text("1 completed, 0 failed", timeout=WAIT)
        expect(page.locator("#load dl")).to_contain_text(f"generated{usage['generated']}", timeout=WAIT)
        expect(tiles.nth(4)).to_contain_text("generated and computed by verifiers", timeout=WAIT)
        total = usage["generated"] + usage["verifier_computed"]
        expect(page.locator("#usage tbody tr").first).to_contain_text(f"local1{total}", timeout=WAIT)
        expect(page.locator("#usage .days i")).to_have_count(14, timeout=WAIT)
        expect(page.locator("#key-list .hint")).to_contain_text("no stored keys", timeout=WAIT)


def test_the_page_reads_the_metrics_as_the_client_of_prometheus_does(browser: Browser, service: Service) -> None:
    job_id = service.submit()
    service.open_gate()
    service.work(job_id).result(60)
    text = httpx.get(f"{service.url}/metrics", timeout=30).text + 'odd{name="a\\"b\\\\c\\nd",le="+Inf"} 1.5e3\n'
    expected: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            expected.setdefault(sample.name, []).append({"labels": dict(sample.labels), "value": sample.value})
    with open_page(browser, service.url) as page:
        read = page.evaluate(
            "text => import('/dashboard/metrics.js').then(m => Object.fromEntries(m.parseMetrics(text)))", text
        )
    assert read == expected


def test_a_key_sees_its_own_usage_and_is_told_which_scope_the_rest_needs(
    browser: Browser, url: str, tmp_path: Path
) -> None:
    with Service(load_settings(redis_url=url, data_dir=tmp_path, api_keys=[ADMIN])) as service:
        made = [
            httpx.post(
                f"{service.url}/v1/keys",
                json={"name": f"of {owner}", "owner": owner},
                headers={"Authorization": f"Bearer {ADMIN}"},
                timeout=30,
            ).json()
            for owner in ("ann", "bob")
        ]
        for secret, panels in ((made[0]["key"], ("metrics:read", "admin")), (ADMIN, None)):
            with open_page(browser, f"{service.url}/#service") as page:
                page.fill("#key", secret)
                page.click("#keys [type=submit]")
                if panels:
                    expect(page.locator("#load .refused")).to_contain_text(panels[0], timeout=WAIT)
                    expect(page.locator("#key-list .refused")).to_contain_text(panels[1], timeout=WAIT)
                    expect(page.locator("#usage .hint")).to_contain_text("No job has ended", timeout=WAIT)
                else:
                    expect_count(page.locator("#key-list tbody tr"), 2)
                    expect(page.locator("#key-list tbody tr").first).to_contain_text("of bobbob", timeout=WAIT)
                    assert made[0]["key"] not in page.content()
