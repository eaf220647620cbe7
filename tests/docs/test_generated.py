"""The committed pages and tables are what the code and the results of benchmarks say now."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate import committed
from docs.generate.committed import ROOT


def test_no_generated_page_table_or_diagram_is_stale() -> None:
    stale = sorted(str(path.relative_to(ROOT)) for path in committed.find_stale())
    if stale:
        pytest.fail(f"{', '.join(stale)} differ from the code or the results: {committed.REMEDY}", pytrace=False)


def test_a_table_is_renewed_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed, "ROOT", tmp_path)
    (tmp_path / "result.md").write_text("# Title\n\n| a |\n|---|\n| 1 |\n\nwords\n\n| b |\n|---|\n| 2 |\n")
    page = "before\n\n<!-- table: result.md -->\n<!-- end -->\n\n<!-- table: result.md #2 -->\nold\n<!-- end -->\n"
    filled = committed.fill_blocks(page)
    assert filled == (
        "before\n\n<!-- table: result.md -->\n\n| a |\n|---|\n| 1 |\n\nwords\n\n| b |\n|---|\n| 2 |\n\n<!-- end -->\n\n"
        "<!-- table: result.md #2 -->\n\n| b |\n|---|\n| 2 |\n\n<!-- end -->\n"
    )
    assert committed.fill_blocks(filled) == filled


def test_every_marker_of_a_table_has_its_end() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        lines = [
            line
            for line in page.read_text().splitlines()
            if line.startswith(("<!-- table:", "<!-- claims:", "<!-- verdicts", "<!-- layers", "<!-- end"))
        ]
        assert [line == "<!-- end -->" for line in lines] == [False, True] * (len(lines) // 2), page


def test_a_result_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(committed, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"gone\.md"):
        committed.fill_blocks("<!-- table: gone.md -->\n<!-- end -->\n")
