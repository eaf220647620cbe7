"""Critiques, matches and rankings on the dashboard."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.e2e.dashboard.service import WAIT, Service, open_page
from tests.scripted import ScriptedEngine
from workers.config.settings import load_settings

BUDGET = {"tokens": 20_000}


def test_critiques_are_folded_under_their_votes_and_matches_under_their_opponents(
    browser: Browser, url: str, tmp_path: Path
) -> None:
    settings = load_settings(redis_url=url, data_dir=tmp_path)
    with Service(settings, ScriptedEngine(context=4000)) as service:
        verifier = {"kind": "generative", "votes": 2, "max_tokens": 16}
        job_id = service.submit(
            problem="how?", strategy={"name": "best_of_n", "n": 8}, verifier=verifier, seed=3, budget=BUDGET
        )
        service.work(job_id).result(60)
        tree = service.get(f"/v1/jobs/{job_id}/tree")
        judged = next(node for node in tree["nodes"] if node["verdicts"])
        [verdict] = judged["verdicts"]
        with open_page(browser, f"{service.url}/#{job_id}") as page:
            page.locator(f"[data-node='{judged['id']}']").click()
            votes = page.locator("#step .critiques summary")
            expect(votes).to_have_text([f"vote {vote:.2f}" for vote in verdict["votes"]], timeout=WAIT)
            critique = page.locator("#step .critiques p").first
            expect(critique).not_to_be_visible()
            votes.first.click()
            expect(critique).to_be_visible()
        given = ["one \\boxed{1}", "two \\boxed{2}", "three \\boxed{2}"]
        strategy = {"name": "select", "by": "tournament"}
        job_id = service.submit(problem="how?", candidates=given, strategy=strategy, seed=3, budget=BUDGET)
        service.work(job_id).result(60)
        ranking = service.get(f"/v1/jobs/{job_id}")["result"]["ranking"]
        matches = service.get(f"/v1/jobs/{job_id}/tree")["matches"]
        with open_page(browser, f"{service.url}/#{job_id}") as page:
            rows = page.locator("#votes li .said")
            expect(page.locator("#votes h3")).to_have_text("Ranking", timeout=WAIT)
            expect(rows).to_have_text([f"{item['index']}: {item['answer']}" for item in ranking], timeout=WAIT)
            page.locator("[data-node='0']").click()
            played = [match for match in matches if "0" in match["nodes"]]
            expect(page.locator("#step .below li > button")).to_have_count(len(played), timeout=WAIT)
