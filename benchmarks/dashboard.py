"""Screenshots of the dashboard, from a service of its own with a few searches, in a real browser.

``python -m benchmarks.dashboard --out benchmarks/results/dashboard``; it needs ``chromium`` on PATH.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from playwright.sync_api import Browser, expect
from rich.console import Console

from api.roles.private_service import run_private_service
from benchmarks.browser import CHROMIUM, chromium
from reasoner.budget.prices import Prices
from reasoner.client import Client
from reasoner.evaluation.suites.registry import load_problems
from workers.config.settings import load_settings

COUNTDOWN = "Make 32 with + - * / from the numbers 4, 10, 4 and 8, each used exactly once."
PRICES = {"policy": Prices(prompt=0.15, cached=0.03, generated=0.6)}
WAIT = 120_000.0


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
    settings = load_settings(prices=PRICES)
    with run_private_service(settings, Console(stderr=True)) as url, Client(url) as client, chromium() as browser:
        for spec in jobs():
            job = client.wait(client.submit({"answer": "text", "seed": 7, **spec}).id)
            print(f"{job.spec.strategy.name}: {job.status}", file=sys.stderr)
        address, events = f"{url}/#{job.id}", job.last_seq
        picture(browser, address, out / "light.png", events)
        picture(browser, address, out / "dark.png", events, at=2 * events // 3, dark=True)
        picture(browser, address, out / "phone.png", events, width=375, height=812)


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
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=2 if width < 900 else 1,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT)
    page = context.new_page()
    page.goto(address)
    expect(page.locator("#event b")).to_have_text(f"{events} / {events}", timeout=WAIT)
    if at is not None:
        page.locator("#seek").fill(str(at))
        page.locator("#seek").blur()
        expect(page.locator("#event b")).to_have_text(f"{at} / {events}", timeout=WAIT)
    page.screenshot(path=path, timeout=WAIT)
    context.close()


if __name__ == "__main__":
    typer.run(main)
