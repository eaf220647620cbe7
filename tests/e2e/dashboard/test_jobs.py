"""Jobs on the dashboard: submission, the live tree, replay, keyboard, cancellation, links and the list."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from playwright.sync_api import Browser, expect

from engine.protocol.types import InvalidRequest
from reasoner.jobs.job import FinishReason
from reasoner.run import JobOutcome, run_job
from tests.e2e.dashboard import service as dashboard_service
from tests.e2e.dashboard.service import (
    INJECTION,
    JOB,
    WAIT,
    Service,
    billed_tokens,
    drawn_nodes,
    expect_count,
    expect_text,
    open_page,
)


def test_a_job_is_submitted_watched_while_its_tree_grows_and_replayed(browser: Browser, service: Service) -> None:
    with open_page(browser, service.url) as page:
        page.keyboard.press("n")
        page.fill("#problem", "3 + 4?")
        page.select_option("#strategies", "beam")
        page.fill("#parameters [name=n]", "4")
        page.fill("#parameters [name=expansions]", "2")
        page.fill("#budget [name=tokens]", "500")
        page.click("#form [type=submit]")
        expect_text(page.locator("#state"), "queued")
        job_id = page.url.partition("#")[2]
        spec = service.get(f"/v1/jobs/{job_id}")["spec"]
        assert (spec["problem"], spec["budget"]["tokens"]) == ("3 + 4?", 500)
        assert {name: spec["strategy"][name] for name in ("name", "n", "expansions")} == JOB["strategy"]

        running = service.work(job_id)
        expect_text(page.locator("#state"), "running")
        expect(page.locator("[data-node='2.0']")).to_be_visible(timeout=WAIT)
        expect_count(drawn_nodes(page, ".pruned"), 2)
        expect(page.locator("[data-node='1'].frontier")).to_be_visible(timeout=WAIT)
        expect_text(page.locator("#votes .said"), "10")
        expect_text(page.locator("#step .value b"), "0.80")
        expect(page.locator("#step .mine p")).to_have_text(INJECTION, timeout=WAIT)
        expect_count(page.locator("img[src=x]"), 0)

        service.open_gate()
        running.result(60)
        expect_text(page.locator("#state"), "completed")
        expect_text(page.locator("#answer .answer"), "7")
        assert [mark.get_attribute("data-node") for mark in drawn_nodes(page, ".best").all()] == ["1", "1.0"]
        expect_count(drawn_nodes(page, ".frontier"), 0)
        job = service.get(f"/v1/jobs/{job_id}")
        tokens = job["usage"]["generated"] + job["usage"]["verifier_computed"]
        expect_text(page.locator("[data-resource=tokens] b"), str(tokens))

        events = service.events(job_id)
        assert [event["seq"] for event in events] == list(range(1, job["last_seq"] + 1))
        assert billed_tokens(events) == tokens
        page.keyboard.press("Home")
        expect_count(drawn_nodes(page), 0)
        for seq in (5, 9, 7, len(events)):
            page.locator("#seek").fill(str(seq))
            so_far = events[:seq]
            expect_count(drawn_nodes(page), len({event["data"]["node"] for event in so_far if event["type"] == "node"}))
            expect_text(page.locator("[data-resource=tokens] b"), str(billed_tokens(so_far)))
        page.locator("#seek").evaluate("slider => slider.blur()")
        page.keyboard.press("Home")
        page.keyboard.press("Space")
        expect(page.locator("#play")).to_have_attribute("aria-pressed", "true", timeout=WAIT)
        expect_text(page.locator("#event b"), f"{len(events)} / {len(events)}")
        expect(page.locator("#play")).to_have_attribute("aria-pressed", "false", timeout=WAIT)
        expect_count(drawn_nodes(page), len(service.get(f"/v1/jobs/{job_id}/tree")["nodes"]))


def test_the_keyboard_navigates_the_tree_and_the_jobs(browser: Browser, service: Service) -> None:
    ids = [service.submit(problem=f"{number}?") for number in range(2)]
    service.open_gate()
    for job_id in ids:
        service.work(job_id).result(60)
    with open_page(browser, service.url) as page:
        expect_text(page.locator("#question"), "1?")
        for key, question in (("j", "0?"), ("k", "1?")):
            page.keyboard.press(key)
            expect_text(page.locator("#question"), question)
        expect_text(page.locator("#event b"), re.compile("^([0-9]+) / \\1$"))
        for key, selected in (
            ("b", "1.0"),
            ("ArrowLeft", "1"),
            ("ArrowUp", "0"),
            ("ArrowDown", "1"),
            ("ArrowDown", "2"),
            ("ArrowRight", "2.0"),
            ("ArrowUp", "1.0"),
        ):
            page.keyboard.press(key)
            expect(page.locator(".node.selected")).to_have_attribute("data-node", selected, timeout=WAIT)
        assert page.url.endswith(f"#{ids[1]}/1.0")
        page.keyboard.press("?")
        expect(page.locator("#shortcuts")).to_be_visible(timeout=WAIT)


def test_cancelling_a_job_asks_for_confirmation_and_ends_it(browser: Browser, service: Service) -> None:
    job_id = service.submit()
    running = service.work(job_id)
    with open_page(browser, f"{service.url}/#{job_id}") as page:
        expect(page.locator("[data-node='2.0']")).to_be_visible(timeout=WAIT)
        page.keyboard.press("c")
        page.click("#sure-dialog .close")
        assert service.get(f"/v1/jobs/{job_id}")["status"] == "in_progress"
        page.click("#cancel")
        page.click("#sure-dialog [type=submit]")
        running.result(60)
        expect_text(page.locator("#state"), "cancelled")
        assert service.get(f"/v1/jobs/{job_id}")["status"] == "cancelled"
        page.click("#delete")
        page.click("#sure-dialog [type=submit]")
        expect_count(page.locator("#list button"), 0)
        assert service.get("/v1/jobs")["data"] == []


def test_a_link_to_a_deleted_job_reports_that_and_shows_no_other_job(browser: Browser, service: Service) -> None:
    kept, gone = service.submit(), f"job_{'0' * 32}"
    with open_page(browser, f"{service.url}/#{gone}") as page:
        expect(page.locator("#welcome")).to_contain_text(f"There is no job {gone}", timeout=WAIT)
        expect_count(page.locator("#list button"), 1)
        expect(page.locator("#search")).to_be_hidden(timeout=WAIT)
        page.click("#list button")
        expect_text(page.locator("#state"), "queued")
        assert page.url.endswith(kept)
        page.goto(f"{service.url}/#{gone}")
        expect(page.locator("#search")).to_be_hidden(timeout=WAIT)
        expect(page.locator("#welcome")).to_contain_text(f"There is no job {gone}", timeout=WAIT)


def test_an_opened_job_is_scrolled_into_view_in_the_list(browser: Browser, service: Service) -> None:
    for _ in range(20):
        service.submit()
    with open_page(browser, service.url) as page:
        expect_count(page.locator("#list button"), 20)
        page.locator("#list button").last.scroll_into_view_if_needed()
        page.keyboard.press("n")
        page.fill("#problem", "3 + 4?")
        page.click("#form [type=submit]")
        expect_count(page.locator("#list button"), 21)
        expect(page.locator("#list [aria-current=true]")).to_be_in_viewport(timeout=WAIT)


def test_why_a_search_ended_and_its_note_are_shown(
    browser: Browser, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = get_args(FinishReason)
    reasons = iter(ends)

    async def run(*arguments: Any, **options: Any) -> JobOutcome:
        outcome = await run_job(*arguments, **options)
        changed = {"finish_reason": next(reasons), "note": "1 verdict could not be read"}
        return replace(outcome, result=outcome.result.model_copy(update=changed))

    monkeypatch.setattr(dashboard_service, "run_job", run)
    service.open_gate()
    shown = set()
    for _ in ends:
        job_id = service.submit()
        service.work(job_id).result(60)
        with open_page(browser, f"{service.url}/#{job_id}") as page:
            expect(page.locator("#answer .facts")).to_contain_text("1 verdict could not be read", timeout=WAIT)
            shown.add(page.locator("#answer .facts").inner_text())
    assert len(shown) == len(ends)


@pytest.mark.parametrize("width", [375, 1440])
def test_a_job_that_failed_before_its_first_branch_shows_the_error_and_no_placeholder(
    browser: Browser, service: Service, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    why = "the problem has 2802 tokens, and the context of model 'policy' holds 512: shorten it so that room is left"

    async def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest(why)

    monkeypatch.setattr(service.engine, "tokenize", refuse)
    job_id = service.submit()
    service.work(job_id).result(60)
    with open_page(browser, f"{service.url}/#{job_id}", width=width, height=720) as page:
        expect_text(page.locator("#answer .facts"), why)
        assert page.evaluate("(box => box.scrollHeight - box.clientHeight)(document.querySelector('#answer'))") == 0
        expect_text(page.locator("#empty"), "The job ended before its first branch.")
        expect_text(page.locator("#step .hint"), "There is no branch to show.")
