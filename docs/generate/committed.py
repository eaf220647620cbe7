"""The generated text that is committed: reference pages, diagrams, tables inside hand-written pages, and a module.

A table in a page stands between ``<!-- table: FILE -->`` and ``<!-- end -->``: all of a results file below its title,
or with ``<!-- table: FILE #2 -->`` its second table. ``<!-- layers -->`` begins the order of the folders, and
``<!-- claims: … -->`` claims beside results (``docs.generate.claims``), which ``<!-- verdicts -->`` counts.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate import claims, diagrams, layers
from docs.generate.blocking_client import make_blocking
from docs.generate.pages import create_pages
from docs.generate.results import create_results_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STRATEGIES = DOCS / "strategies"
RESULTS = ROOT / "benchmarks" / "results"
CLIENT = ROOT / "reasoner" / "client"
REMEDY = "`make docs` writes them (`.venv/bin/python -m docs.generate` does so without building the site)"

_NOTICE = "<!-- Written by `make docs` from the code: change the text there. -->\n\n"
_BLOCK = re.compile(
    r"^(?P<start><!-- (?:table: (?P<path>\S+?)(?: #(?P<number>\d+))?|claims: (?P<claims>.+?)|verdicts|layers) -->)\n"
    r"(?P<text>.*?)^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)


def find_stale() -> dict[Path, str]:
    """Return the new text of every committed file that differs from what the code and the results say."""
    return {path: text for path, text in _create_files().items() if not path.exists() or path.read_text() != text}


def _create_files() -> dict[Path, str]:
    files = {DOCS / "reference" / name: _NOTICE + text.rstrip() + "\n" for name, text in create_pages().items()}
    files[DOCS / "benchmarks" / "results.md"] = _NOTICE + create_results_page(ROOT / "benchmarks" / "results")
    files[CLIENT / "_client.py"] = make_blocking((CLIENT / "_async_client.py").read_text())
    files |= {diagrams.IMAGES / name: draw().svg() for name, draw in diagrams.DRAWINGS.items()}
    written = (path for path in sorted(DOCS.rglob("*.md")) if path not in files)
    return files | {path: fill_blocks(path.read_text()) for path in written}


def fill_blocks(page: str) -> str:
    """Return a page with the present text between its markers."""
    return _BLOCK.sub(lambda block: f"{block['start']}\n\n{_create_block(block).strip(chr(10))}\n\n<!-- end -->", page)


def _create_block(block: re.Match[str]) -> str:
    if block["claims"] is not None:
        return claims.create_table(block["claims"], RESULTS)
    if "verdicts" in block["start"]:
        return claims.create_summary(sorted(set(STRATEGIES.glob("*.md")) - {STRATEGIES / "index.md"}), RESULTS)
    if block["path"] is None:
        return layers.text(ROOT / "pyproject.toml")
    text = (ROOT / block["path"]).read_text()
    if block["number"] is None:
        return text.split("\n", 1)[1] if text.startswith("# ") else text
    tables: list[str] = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return tables[int(block["number"]) - 1]
