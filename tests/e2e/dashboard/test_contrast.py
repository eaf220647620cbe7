"""Contrast and names on the dashboard: WCAG 2.2 AA for every text of every view, in light and dark mode."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.dashboard.service import WAIT, Service, open_page

LOW_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    canvas.globalCompositeOperation = "copy";
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      canvas.globalCompositeOperation = "source-over";
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => rgb.map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const disabled = element.matches(":disabled") || element.closest(".hidden, svg, :disabled, option");
    if (!text || disabled || !element.checkVisibility({ visibilityProperty: true })) continue;
    const grounds = [];
    for (let at = element; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
    const style = getComputedStyle(element);
    const [front, back] = [[...grounds, style.color], grounds].map((all) => luminance(paint(["white", ...all])));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.push([element.outerHTML.slice(0, 120), ratio]);
  }
  return found;
}"""

UNNAMED = """() => [...document.querySelectorAll("button, a, input, select, textarea, [role=treeitem]")]
  .filter((element) => element.checkVisibility())
  .filter((element) => !(element.ariaLabel || element.labels?.length || element.getAttribute("aria-labelledby")
    || element.textContent.trim())).map((element) => element.outerHTML)"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_of_every_view_has_contrast_and_every_control_a_name(
    browser: Browser, service: Service, dark: bool
) -> None:
    service.open_gate()
    ids = [service.submit(), service.submit(problem="other?", strategy={"name": "best_of_n", "n": 2})]
    for job_id in ids:
        service.work(job_id).result(60)
    service.submit()
    failed = service.submit(problem="word " * 4)
    with open_page(browser, service.url, dark=dark) as page:
        for address, ready in (
            (f"#{ids[0]}", "#outline [role=treeitem]"),
            (f"#{failed}", "#empty"),
            ("#batches", "#nobatches"),
            (f"#compare/{ids[0]}/{ids[1]}", "#differences table"),
            ("#evaluation", "#curves .hint"),
            ("#service", "#usage table"),
        ):
            page.goto(f"{service.url}/{address}")
            expect(page.locator(ready).first).to_be_attached(timeout=WAIT)
            expect(page.locator("#service")).to_have_attribute("data-ready", "yes", timeout=WAIT)
            assert page.evaluate(LOW_CONTRAST) == [], address
            assert page.evaluate(UNNAMED) == [], address
        page.goto(f"{service.url}/#{ids[0]}")
        page.click("#listing")
        page.click("#more-count")
        assert page.evaluate(LOW_CONTRAST) == []
        page.click("#new")
        expect(page.locator("#parameters label").first).to_be_visible(timeout=WAIT)
        page.evaluate("document.querySelectorAll('#form details').forEach(part => { part.open = true; })")
        assert page.evaluate(LOW_CONTRAST) == []
        assert page.evaluate(UNNAMED) == []
