"""Every relative link of every Markdown file works on a forge, path and anchor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import forge
from tests.docs.blocks import ROOT

PAGES = sorted(path for path in forge.list_files() if path.suffix == ".md")


def test_there_are_pages_and_links() -> None:
    assert len(PAGES) > 100
    assert len([link for page in PAGES for link in forge.find_links(page.read_text())]) > 250


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere_on_a_forge(page: Path) -> None:
    assert forge.find_dead(page, page.read_text()) == []


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("POST /v1/jobs/{job_id}/cancel", "post-v1jobsjob_idcancel"),
        ("`[models.NAME]`", "modelsname"),
        ("self_consistency", "self_consistency"),
        ("What it *costs*: **all** of it", "what-it-costs-all-of-it"),
        ("In the model's own format", "in-the-models-own-format"),
        ("Größe & Maß — 2×", "größe--maß--2"),
        ("A [link](other.md) in it", "a-link-in-it"),
        ("reasoner prm train", "reasoner-prm-train"),
    ],
)
def test_a_heading_has_the_anchor_that_github_gives_it(heading: str, anchor: str) -> None:
    assert forge.find_anchors(f"# Title\n\n## {heading}\n") == {"title", anchor}


def test_dead_links_of_every_form_are_found() -> None:
    text = """
[a](missing.md) [b](../index.md#missing) [c][reference] ![d](no.png) <img src="no.svg"> [e](/docs/index.md)
[good](../index.md) [good](models.md#process-reward-models) `[code](no.md)` [good](https://example.com/no)
[good](../reference/) [f](../../../../../etc/passwd) [g](../Index.md) [h](#missing) [good](#here)

## Here

```
[code](no.md)
```

[reference]: gone.md
"""
    dead = [line.split(": ")[0] for line in forge.find_dead(ROOT / "docs" / "how-to" / "page.md", text)]
    files = {"missing.md", "gone.md", "no.png", "no.svg", "/docs/index.md", "../../../../../etc/passwd", "../Index.md"}
    assert set(dead) == files | {"../index.md#missing", "#missing"}


def test_a_heading_that_is_there_twice_is_no_target() -> None:
    text = "# Same\n\n# Same\n\n[a](#same) [b](#same-1)\n"
    assert len(forge.find_dead(ROOT / "page.md", text)) == 2
