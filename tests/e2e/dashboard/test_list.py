"""The list of jobs on the dashboard: answers, confidence, models, search, filters, pages, and what may look right."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from reasoner.run import JobOutcome, run_job
from tests.e2e.dashboard import service as dashboard_service
from tests.e2e.dashboard.service import (
    WAIT,
    Service,
    expect_count,
    expect_text,
    open_page,
)


def run_jobs(service: Service, *jobs: dict[str, Any]) -> list[str]:
    """Submit jobs and run them; return their ids."""
    service.open_gate()
    ids = [service.submit(**job) for job in jobs]
    for job_id in ids:
        service.work(job_id).result(60)
    return ids


def read_colour(page: Page, variable: str) -> Any:
    """Return a colour of the theme as the browser computes it."""
    return page.evaluate(
        "name => { const box = document.body.appendChild(document.createElement('i'));"
        " box.style.color = `var(${name})`; const { color } = getComputedStyle(box); box.remove(); return color; }",
        variable,
    )


def find_colours(within: Locator) -> set[str]:
    """Return the colours of the texts within an element."""
    colours = within.evaluate("box => [box, ...box.querySelectorAll('*')].map(part => getComputedStyle(part).color)")
    return set(colours)


def test_a_job_in_the_list_has_its_answer_its_confidence_and_its_model(browser: Browser, service: Service) -> None:
    [job_id] = run_jobs(service, {"model": "policy"})
    confidence = service.get(f"/v1/jobs/{job_id}")["result"]["confidence"]
    with open_page(browser, service.url) as page:
        expect_text(page.locator("#list .said"), "7")
        expect_text(page.locator("#list .found .chip"), f"{confidence:.2f}")
        expect_text(page.locator("#list .model"), "policy")
        expect_text(page.locator("#list .strategy"), "beam")


@pytest.mark.parametrize("dark", [False, True])
def test_an_answer_that_looks_wrong_is_nowhere_green(
    browser: Browser, service: Service, monkeypatch: pytest.MonkeyPatch, dark: bool
) -> None:
    changes: list[dict[str, Any]] = [
        {"confidence": 0.9},
        {"confidence": 0.03},
        {"answer": None, "confidence": None, "finish_reason": "no_answer"},
        {"confidence": 0.9, "answer_level": "flexible"},
        {"confidence": None},
    ]
    left = iter(changes)

    async def run(*arguments: Any, **options: Any) -> JobOutcome:
        outcome = await run_job(*arguments, **options)
        return replace(outcome, result=outcome.result.model_copy(update=next(left)))

    monkeypatch.setattr(dashboard_service, "run_job", run)
    ids = run_jobs(service, *({"problem": f"{number}?"} for number in range(len(changes))))
    with open_page(browser, service.url, dark=dark) as page:
        good = read_colour(page, "--good")
        expect_count(page.locator("#list button"), len(ids))
        rows = [page.locator("#list button", has_text=f"{number}?") for number in range(len(ids))]
        assert [good in find_colours(row) for row in rows] == [True, False, False, False, False]
        expect(rows[1]).to_contain_text("completed, doubtful", timeout=WAIT)
        expect(rows[2]).to_contain_text("completed, no answer", timeout=WAIT)
        for job_id, is_likely in zip(ids, [True, False, False, False, False], strict=True):
            page.goto(f"{service.url}/#{job_id}")
            expect(page.locator(f"#compare-with[href='#compare/{job_id}']")).to_have_count(1, timeout=WAIT)
            expect(page.locator("#state")).to_contain_text("completed", timeout=WAIT)
            expect(page.locator("#state")).to_have_attribute("data-trust", re.compile("."), timeout=WAIT)
            assert (good in find_colours(page.locator("#search"))) == is_likely


def test_filters_become_parameters_of_the_list_and_a_refusal_is_shown_at_its_field(
    browser: Browser, service: Service
) -> None:
    run_jobs(service, {"problem": "first?"}, {"problem": "second?"})
    service.submit(problem="third?")
    asked: list[dict[str, list[str]]] = []

    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        asked.append(query)
        jobs = [job for job in service.get("/v1/jobs")["data"] if query["q"][0] in job["spec"]["problem"]]
        route.fulfill(json={"data": jobs, "first_id": None, "last_id": None, "has_more": False})

    with open_page(browser, service.url) as page:
        expect_count(page.locator("#list button"), 3)
        page.select_option("#status", "queued")
        expect_count(page.locator("#list button"), 1)
        expect(page.locator("#list .title")).to_have_text("third?", timeout=WAIT)
        page.click("#clear")
        expect_count(page.locator("#list button"), 3)
        page.route(re.compile(r"/v1/jobs\?.*q="), answer)
        page.keyboard.press("/")
        page.keyboard.type("second")
        expect_count(page.locator("#list button"), 1)
        expect_text(page.locator("#listed"), "1 found")
        page.click("#more-count")
        for name, value in (("model", "policy"), ("name", "panel"), ("owner", "ann"), ("metadata", "course=a, run=7")):
            page.fill(f"#filters [name={name}]", value)
        page.fill("#filters [name=created_after]", "2026-01-02T03:04")
        expect_text(page.locator("#more-count"), "Filters · 5")
        page.wait_for_function(
            "() => performance.getEntriesByType('resource').some(e => e.name.includes('created_after'))"
        )
        assert {name: value for name, value in asked[-1].items() if name not in ("limit", "created_after")} == {
            "q": ["second"],
            "model": ["policy"],
            "name": ["panel"],
            "owner": ["ann"],
            "metadata[course]": ["a"],
            "metadata[run]": ["7"],
        }
        assert float(asked[-1]["created_after"][0]) == page.evaluate("Date.parse('2026-01-02T03:04') / 1000")
        page.fill("#query", "nothing of the kind")
        expect(page.locator("#nomatch")).to_be_visible(timeout=WAIT)
        page.click("#clear")
        page.select_option("#status", "completed")
        page.evaluate("document.querySelector('#status').insertAdjacentHTML('beforeend', '<option>unheard</option>')")
        page.select_option("#status", "unheard")
        expect(page.locator("#refused-filter")).to_contain_text("status", timeout=WAIT)
        expect(page.locator("#status")).to_have_attribute("aria-invalid", "true", timeout=WAIT)
        expect_count(page.locator("#list button"), 0)


def test_older_jobs_are_read_page_by_page_and_stay_while_new_ones_arrive(browser: Browser, service: Service) -> None:
    for number in range(53):
        service.submit(problem=f"{number}?")
    with open_page(browser, service.url) as page:
        expect_count(page.locator("#list button"), 50)
        page.click("#older")
        expect_count(page.locator("#list button"), 53)
        expect(page.locator("#older")).to_be_hidden(timeout=WAIT)
        service.submit(problem="new?")
        expect_count(page.locator("#list button"), 54)
        titles = page.locator("#list .title").all_inner_texts()
        assert titles == ["new?", *(f"{number}?" for number in reversed(range(53)))]
