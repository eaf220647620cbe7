"""Links and anchors of Markdown files as a forge (GitHub, and those that follow it) makes them."""

from __future__ import annotations

import os
import re
import subprocess
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.blocks import ROOT

_ATTRIBUTE = re.compile(r"""<\w[^>]*?\s(?P<name>href|src|srcset|id|name)\s*=\s*["'](?P<value>[^"']*)["']""")
_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


@cache
def list_files() -> frozenset[Path]:
    """Return the files of the repository; where that is no checkout, all files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if listed.returncode:  # no checkout
        return frozenset(path for path in ROOT.rglob("*") if path.is_file())
    return frozenset(ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists())


@cache
def list_folders() -> frozenset[Path]:
    return frozenset(folder for path in list_files() for folder in path.parents)


def find_links(text: str) -> list[str]:
    """Return the targets of all links and images of a page, those in its HTML too."""
    links = []
    for token in _walk(_PARSER.parse(text)):
        links += [str(token.attrs[name]) for name in ("href", "src") if name in token.attrs]
        if token.type.startswith("html"):
            links += [value for name, value in _ATTRIBUTE.findall(token.content) if name in ("href", "src", "srcset")]
    return links


@cache
def find_anchors(text: str) -> frozenset[str]:
    """Return the anchors of a page. A heading that repeats another one is left out: its number differs by renderer."""
    tokens = _PARSER.parse(text)
    headings = Counter(make_anchor(inline) for token, inline in pairwise(tokens) if token.type == "heading_open")
    anchors = {anchor for anchor, count in headings.items() if count == 1}
    for token in _walk(tokens):
        if token.type.startswith("html"):
            anchors |= {value for name, value in _ATTRIBUTE.findall(token.content) if name in ("id", "name")}
    return frozenset(anchors)


def make_anchor(heading: Token) -> str:
    """Return a heading's anchor: its text in lower case, spaces as hyphens, without punctuation but for - and _."""
    text = "".join(
        token.content for token in heading.children or () if token.type in ("text", "code_inline", "text_special")
    )
    kept = (character for character in text.strip().lower() if character in "-_ " or _is_word(character))
    return "".join(kept).replace(" ", "-")


def find_dead(page: Path, text: str) -> list[str]:
    """Return a line for each relative link of a page with this text that leads nowhere on a forge."""
    dead = []
    for link in find_links(text):
        url = urlsplit(link)
        if url.scheme or url.netloc:
            continue
        target = Path(os.path.normpath(page.parent / unquote(url.path))) if url.path else page
        if url.path.startswith("/") or (target != page and target not in list_files() | list_folders()):
            dead.append(f"{link}: no such file in the repository")
        elif url.fragment and target.suffix == ".md":
            target_text = text if target == page else target.read_text()
            if unquote(url.fragment) not in find_anchors(target_text):
                dead.append(f"{link}: no such heading, or one that is there twice")
    return dead


def _walk(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _walk(token.children or [])


def _is_word(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN" or unicodedata.category(character) == "Pc"
