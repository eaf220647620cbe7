"""Two jobs side by side on the dashboard."""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.e2e.dashboard.service import WAIT, Service, expect_count, expect_text, open_page, overflowing_elements


def test_two_jobs_are_compared_by_answer_cost_settings_and_tree(browser: Browser, service: Service) -> None:
    service.open_gate()
    ids = [service.submit(), service.submit(problem="other?"), service.submit(strategy={"name": "best_of_n", "n": 2})]
    for job_id in ids:
        service.work(job_id).result(60)
    first, _, second = ids
    with open_page(browser, f"{service.url}/#{first}") as page:
        page.click("#compare-with")
        expect(page.locator("#side-b select")).to_have_value(second, timeout=WAIT)  # the other job with its question
        expect(page.locator("#side-a select")).to_have_value(first, timeout=WAIT)
        expect(page.locator("#side-a .answer")).to_contain_text("7", timeout=WAIT)
        for side, job_id in (("#side-a", first), ("#side-b", second)):
            tree = service.get(f"/v1/jobs/{job_id}/tree")["nodes"]
            expect_count(page.locator(f"{side} .node:visible"), len(tree))
        tokens = [
            service.get(f"/v1/jobs/{job}")["usage"]["generated"]
            + service.get(f"/v1/jobs/{job}")["usage"]["verifier_computed"]
            for job in (first, second)
        ]
        row = page.locator("#differences tr", has=page.locator("td", has_text="tokens")).first.locator("td")
        expect(row).to_have_text(["tokens", *map(str, tokens), f"{tokens[1] / tokens[0]:.2f} ×"], timeout=WAIT)
        expect(page.locator("#differences")).to_contain_text("beam n 4", timeout=WAIT)
        expect(page.locator("#differences")).to_contain_text("best_of_n n 2", timeout=WAIT)
        page.click("#swap")
        expect(page.locator("#side-a select")).to_have_value(second, timeout=WAIT)
        page.select_option("#side-b select", ids[1])
        expect(page.locator("#differences")).to_contain_text("other?", timeout=WAIT)
        assert page.url.endswith(f"#compare/{second}/{ids[1]}")
        page.locator("#side-b a.status").click()
        expect_text(page.locator("#question"), "other?")


def test_a_running_job_is_compared_while_its_tree_grows_also_on_a_phone(browser: Browser, service: Service) -> None:
    ids = [service.submit(), service.submit(problem="word " * 20 + "unbreakable" * 8)]
    running = service.work(ids[0])
    with open_page(browser, f"{service.url}/#compare/{ids[0]}/{ids[1]}", width=375, height=720) as page:
        expect(page.locator("#side-a [data-node='2.0']")).to_be_visible(timeout=WAIT)
        expect(page.locator("#side-b .empty")).to_be_visible(timeout=WAIT)
        service.open_gate()
        running.result(60)
        expect(page.locator("#side-a .answer")).to_contain_text("7", timeout=WAIT)
        assert overflowing_elements(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 375
