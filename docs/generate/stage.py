"""Copy the hand-written pages to ``build/docs``, and what they link to outside ``docs/``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs"
STAGE = ROOT / "build" / "docs"

PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "recipes/bundled/README.md": "recipes/bundled.md",
    "recipes/prm/README.md": "recipes/prm.md",
    "recipes/speculation/README.md": "recipes/speculation.md",
    "recipes/wheel/README.md": "recipes/wheel.md",
}
"""Pages outside ``docs/`` that the site has too, by their place in it."""
_FILES = "files"
"""Folder of the site for what is linked and is no page."""
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")


def stage() -> None:
    """Write ``build/docs`` anew."""
    shutil.rmtree(STAGE, ignore_errors=True)
    for page in sorted(SOURCE.rglob("*")):
        if page.is_file() and "generate" not in page.relative_to(SOURCE).parts:
            _copy(page, STAGE / page.relative_to(SOURCE))
    for outside, place in PAGES.items():
        _copy(ROOT / outside, STAGE / place)


def _copy(page: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if page.suffix != ".md":
        shutil.copy2(page, to)
        return
    text = page.read_text()
    to.write_text(_LINK.sub(lambda match: _rewritten(page, to, match[1]) + (match[2] or ""), text))


def _rewritten(page: Path, to: Path, link: str) -> str:
    """Return a link of a page for its place in the site. Files outside ``docs/`` are copied beside it."""
    if "://" in link or link.startswith("mailto:"):
        return link
    target = (page.parent / link).resolve()
    if target.is_relative_to(SOURCE):
        place = STAGE / target.relative_to(SOURCE)
    elif not target.exists() or not target.is_relative_to(ROOT):
        raise SystemExit(f"{page.relative_to(ROOT)}: {link}: there is no such file")
    elif (name := str(target.relative_to(ROOT))) in PAGES:
        place = STAGE / PAGES[name]
    elif target.is_dir() or target.suffix == ".md":
        return link if page.name in ("README.md", "CHANGELOG.md") else _refused(page, link)
    else:
        place = STAGE / _FILES / target.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(target, place)
    return _relative(place, to.parent)


def _refused(page: Path, link: str) -> str:
    raise SystemExit(f"{page.relative_to(ROOT)}: {link}: link to a page of docs/, or name the path as code")


def _relative(path: Path, folder: Path) -> str:
    ups = 0
    while not path.is_relative_to(folder):
        folder, ups = folder.parent, ups + 1
    return "../" * ups + path.relative_to(folder).as_posix()
