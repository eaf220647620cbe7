"""Screenshots of the dashboard, from a service of its own with a few searches, in a real browser.

``python -m benchmarks.dashboard --out benchmarks/results/dashboard``; it needs ``chromium`` on PATH.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from playwright.sync_api import Browser, Page, expect
from rich.console import Console

from api.roles.private_service import run_private_service
from benchmarks.browser import CHROMIUM, chromium
from reasoner.client import Client
from reasoner.evaluation.suites.registry import load_problems
from workers.config.settings import load_settings

COUNTDOWN = "Make 32 with + - * / from the numbers 4, 10, 4 and 8, each used exactly once."
PRICES = {"policy": {"prices": {"prompt": 0.15, "cached": 0.03, "generated": 0.6}}}
WAIT = 120_000.0
EVALUATION = Path(__file__).parent / "results" / "words" / "results.json"


def jobs() -> list[dict[str, Any]]:
    """Return the jobs; the screenshots show the last one."""
    words = load_problems("words", limit=9)
    return [
        {"problem": words[4].text, "strategy": {"name": "weighted_vote", "n": 32}, "budget": {"tokens": 8000}},
        {"problem": words[2].text, "strategy": {"name": "auto", "n": 16}, "budget": {"tokens": 4000}},
        {"problem": COUNTDOWN, "strategy": {"name": "best_of_n", "n": 64}, "budget": {"tokens": 12000, "seconds": 60}},
        {"problem": COUNTDOWN, "strategy": {"name": "mcts", "n": 16}, "budget": {"tokens": 1200, "seconds": 60}},
        {"problem": COUNTDOWN, "strategy": {"name": "beam", "n": 64}, "budget": {"tokens": 20000, "seconds": 60}},
        {"problem": COUNTDOWN, "strategy": {"name": "beam", "n": 16}, "budget": {"tokens": 1000, "cost": 0.0005}},
    ]


def main(
    out: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("benchmarks/results/dashboard"),
) -> None:
    """Take screenshots of the dashboard in light mode, in dark mode and on a phone."""
    if CHROMIUM is None:
        raise typer.BadParameter("there is no 'chromium' on PATH")
    out.mkdir(parents=True, exist_ok=True)
    settings = load_settings(models=PRICES)
    with run_private_service(settings, Console(stderr=True)) as url, Client(url) as client, chromium() as browser:
        ids: list[str] = []
        for spec in jobs():
            job = client.wait(client.submit({"answer": "text", "seed": 7, **spec}).id)
            print(f"{job.spec.strategy.name}: {job.status}", file=sys.stderr)
            ids.append(job.id)
        httpx.post(f"{url}/v1/batches", json=batch(), timeout=30).raise_for_status()
        address, events = f"{url}/#{job.id}", job.last_seq
        picture(browser, address, out / "light.png", events)
        picture(browser, address, out / "dark.png", events, at=2 * events // 3, dark=True)
        picture(browser, address, out / "phone.png", events, width=375, height=812)
        for name, place, ready in (
            ("batches", "#batches", "#batch table"),
            ("compare", f"#compare/{ids[-2]}/{ids[-3]}", "#differences table"),
            ("service", "#service", ".tile .curve"),
            ("evaluation", "#evaluation", "#curves"),
        ):
            for suffix, options in (("", {}), ("-dark", {"dark": True}), ("-phone", {"width": 375, "height": 812})):
                picture_view(browser, f"{url}/{place}", out / f"{name}{suffix}.png", ready=ready, **options)


def batch() -> dict[str, Any]:
    """Return a batch of jobs that share a budget."""
    words = load_problems("words", limit=8)
    common = {"strategy": {"name": "weighted_vote", "n": 32}, "answer": "text", "seed": 7}
    return {
        "jobs": [{"problem": problem.text} | common for problem in words],
        "budget": {"tokens": 12_000},
        "metadata": {"course": "words"},
    }


def picture_view(
    browser: Browser,
    address: str,
    path: Path,
    *,
    ready: str,
    dark: bool = False,
    width: int = 1440,
    height: int = 900,
) -> None:
    """Take a screenshot of a view when what ``ready`` selects is there; an evaluation is opened first."""
    with open_page(browser, address, dark=dark, width=width, height=height) as page:
        if path.name.startswith("evaluation"):
            page.set_input_files("#results", EVALUATION)
            expect(page.locator("#curves .chart")).to_be_visible(timeout=WAIT)
        if path.name.startswith("batches-phone"):
            page.locator("#batch-list a").first.click()
        expect(page.locator(ready).first).to_be_attached(timeout=WAIT)
        page.screenshot(path=path, timeout=WAIT)


@contextlib.contextmanager
def open_page(browser: Browser, address: str, *, dark: bool, width: int, height: int) -> Iterator[Page]:
    """Open an address without animations, on phones with their density."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=2 if width < 900 else 1,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT)
    page = context.new_page()
    page.goto(address)
    yield page
    context.close()


def picture(
    browser: Browser,
    address: str,
    path: Path,
    events: int,
    *,
    at: int | None = None,
    dark: bool = False,
    width: int = 1440,
    height: int = 900,
) -> None:
    """Open a job and take a screenshot after event ``at``, or of its end."""
    with open_page(browser, address, dark=dark, width=width, height=height) as page:
        expect(page.locator("#event b")).to_have_text(f"{events} / {events}", timeout=WAIT)
        if at is not None:
            page.locator("#seek").fill(str(at))
            page.locator("#seek").blur()
            expect(page.locator("#event b")).to_have_text(f"{at} / {events}", timeout=WAIT)
        page.screenshot(path=path, timeout=WAIT)


if __name__ == "__main__":
    typer.run(main)
