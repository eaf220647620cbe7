"""Code blocks of Markdown pages, and the shell script that runs those of a page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
"""The service of all examples."""
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_PREAMBLE = """\
set -eu
curl() { command curl --fail-with-body --show-error "$@"; }
set -x
"""


@dataclass(frozen=True)
class Block:
    """A fenced block. ``mark`` is the comment directly above it."""

    language: str
    code: str
    mark: str

    @property
    def is_run(self) -> bool:
        return self.language in ("bash", "python") and not self.mark


def pages() -> list[Path]:
    """Return all pages with examples: the README, CONTRIBUTING, AGENTS, and what is in ``docs/`` and ``examples/``."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "examples/README.md")]
    return found + sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(match["language"], match["code"], match["mark"] or "") for match in _BLOCK.finditer(page.read_text())]


def script(page: Path, url: str) -> str:
    """Return a shell script of the page's blocks that run, in their order, against the service at ``url``."""
    parts = [_PREAMBLE]
    for block in blocks(page):
        if block.is_run:
            parts.append(block.code if block.language == "bash" else f"python - <<'PYTHON'\n{block.code}PYTHON\n")
    return "\n".join(parts).replace(ADDRESS, url)
