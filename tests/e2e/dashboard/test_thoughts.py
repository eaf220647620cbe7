"""Thoughts on the dashboard: folded with their number of tokens, and as text only when opened."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.e2e.dashboard.service import WAIT, Service, open_page
from tests.scripted import ScriptedEngine
from workers.config.settings import load_settings


def test_a_thought_is_folded_and_one_that_its_limit_closed_says_so(browser: Browser, url: str, tmp_path: Path) -> None:
    settings = load_settings(redis_url=url, data_dir=tmp_path)
    with Service(settings, ScriptedEngine(thinks=True)) as service:
        strategy = {"name": "self_consistency", "n": 6}
        limits = {"tokens": 2000, "thinking_tokens": 12}
        job_id = service.submit(problem="how?", model="policy", strategy=strategy, verifier=None, budget=limits, seed=3)
        service.work(job_id).result(60)
        nodes = service.get(f"/v1/jobs/{job_id}/tree")["nodes"]
        for is_forced in (True, False):
            node = next(node for node in nodes if _is_closed_by_limit(node) == is_forced and "</think>" in node["text"])
            generated = [part for part in node["parts"] if part["origin"] == "generated"]
            tokens = sum(part["tokens"] for part in generated if part["kind"] == "thought")
            with open_page(browser, f"{service.url}/#{job_id}") as page:
                page.locator(f"[data-node='{node['id']}']").click()
                summary = page.locator("#step .mine details.thought summary")
                ending = ", closed by the search" if is_forced else ""
                expect(summary).to_have_text(f"Thought, {tokens} tokens{ending}", timeout=WAIT)
                thought = page.locator("#step .mine details.thought p")
                expect(thought).not_to_be_visible()
                summary.click()
                expect(thought).to_contain_text(node["text"][:10].strip(), timeout=WAIT)


def _is_closed_by_limit(node: dict[str, list[dict[str, str]]]) -> bool:
    return any(part["origin"] == "injected" for part in node["parts"])
