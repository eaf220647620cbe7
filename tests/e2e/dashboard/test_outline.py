"""The search tree as a list, for screen readers and keyboards."""

from __future__ import annotations

import contextlib
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.e2e.dashboard.service import WAIT, Service, expect_count, open_page
from tests.scripted import ScriptedEngine
from workers.config.settings import load_settings


def test_a_screen_reader_gets_the_tree_with_levels_scores_and_answers(browser: Browser, service: Service) -> None:
    job_id = service.submit()
    service.open_gate()
    service.work(job_id).result(60)
    nodes = {node["id"]: node for node in service.get(f"/v1/jobs/{job_id}/tree")["nodes"]}
    with open_page(browser, f"{service.url}/#{job_id}") as page:
        tree = page.get_by_role("tree", name="Branches of the search")
        branches = tree.get_by_role("treeitem")
        expect_count(branches, 5)
        expect(tree.get_by_role("treeitem", name="Branch 1.0: score 0.90", exact=False)).to_have_attribute(
            "aria-level", "2", timeout=WAIT
        )
        expect(tree.get_by_role("treeitem", name="on the best path, answer 7")).to_have_count(1, timeout=WAIT)
        expect(page.locator("[data-branch='2']")).to_have_attribute("aria-expanded", "false", timeout=WAIT)
        assert set(branches.evaluate_all("items => items.map(item => item.dataset.branch)")) < set(nodes)
        page.locator("[data-branch='2']").focus()
        page.keyboard.press("ArrowRight")
        expect_count(branches, len(nodes))
        page.keyboard.press("ArrowDown")
        expect(page.locator("[data-branch='2.0']")).to_be_focused(timeout=WAIT)
        page.keyboard.press("Enter")
        expect(page.locator("[data-branch='2.0']")).to_have_attribute("aria-selected", "true", timeout=WAIT)
        expect(page.locator(".node.selected")).to_have_attribute("data-node", "2.0", timeout=WAIT)
        page.keyboard.press("ArrowLeft")
        expect(page.locator("[data-branch='2']")).to_be_focused(timeout=WAIT)
        page.keyboard.press("Home")
        expect(page.locator("[data-branch='0']")).to_be_focused(timeout=WAIT)


def test_the_list_of_a_wide_tree_is_unfolded_a_hundred_branches_at_a_time(
    browser: Browser, url: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        settings = load_settings(redis_url=url, data_dir=tmp_path)
        service = stack.enter_context(Service(settings, ScriptedEngine(context=4000)))
        job_id = service.submit(strategy={"name": "best_of_n", "n": 250}, budget={"tokens": 50_000})
        service.work(job_id).result(60)
        page = stack.enter_context(open_page(browser, f"{service.url}/#{job_id}"))
        page.click("#listing")
        expect(page.locator("#outline")).to_be_in_viewport(timeout=WAIT)
        expect(page.locator("#canvas")).to_be_hidden(timeout=WAIT)
        for shown in (100, 200, 250):
            expect_count(page.locator("#outline [role=treeitem]"), shown)
            if shown < 250:
                page.locator("#outline [data-more]").click()
        expect(page.locator("#outline [role=treeitem]").first).to_have_attribute("aria-setsize", "250", timeout=WAIT)
        page.keyboard.press("Escape")
        page.reload()
        expect(page.locator("#listing")).to_have_attribute("aria-pressed", "true", timeout=WAIT)
