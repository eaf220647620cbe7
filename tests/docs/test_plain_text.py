"""The index for language models links every page of the navigation, each as Markdown beside the rendered one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from docs.generate import stage
from docs.generate.plain_text import find_summary, write_plain_text
from tests.docs.blocks import ROOT


def _pages(nav: Any) -> list[str]:
    return (
        [nav] if isinstance(nav, str) else [page for item in nav for value in item.values() for page in _pages(value)]
    )


def test_every_page_of_the_site_is_there_as_markdown_and_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "STAGE", tmp_path / "docs")
    stage.stage()
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    write_plain_text(project, tmp_path / "docs", tmp_path / "site")
    index = (tmp_path / "site" / "llms.txt").read_text()
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", index, re.MULTILINE)
    assert sorted(links) == sorted(_pages(project["nav"]))
    for link in links:
        assert (tmp_path / "site" / link).read_text() == (tmp_path / "docs" / link).read_text()
    hand_written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert hand_written <= {str(page.relative_to(tmp_path / "site")) for page in (tmp_path / "site").rglob("*.md")}


def test_a_summary_is_the_first_sentence_of_prose() -> None:
    page = "# Title\n\n```bash\nrun it. Now.\n```\n\n| a | b |\n\n![x](y.png)\n\nSee [the engine](e.md) of\nours. More."
    assert find_summary(page) == "See the engine of ours."
    assert find_summary("# Title\n\n| a | b |\n") == ""
