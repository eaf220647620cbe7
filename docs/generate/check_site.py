"""Check the rendered documentation: every internal link has its target, and no page fetches anything from elsewhere.

Zensical's strict mode checks the links of Markdown sources. This also covers what is only in the HTML: links of
generated API references, images, stylesheets and scripts.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parents[2] / "build" / "site"


class Page(HTMLParser):
    """Ids, links and fetched resources of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if "id" in attributes:
            self.ids.add(attributes["id"])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in attributes:
            self.fetched.append(attributes["src"])
        if tag == "link" and attributes.get("rel") not in ("canonical", "alternate", "next", "prev"):
            self.fetched.append(attributes["href"])


def problems(site: Path) -> list[str]:
    """Return a line for each broken link and each resource of another host."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    lines = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        lines += [f"{name}: fetches {url}" for url in page.fetched if urlsplit(url).netloc]
        for link in (*page.links, *page.fetched):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            if name.name == "404.html" and not target.exists():
                continue  # its links are absolute: they depend on where the site is served
            if not target.exists():
                lines.append(f"{name}: {link}: no such file")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
                lines.append(f"{name}: {link}: no such anchor")
    return sorted(set(lines))


def main() -> int:
    lines = problems(SITE)
    print(*lines, sep="\n", end="\n" if lines else "")
    print(f"{len(list(SITE.rglob('*.html')))} pages checked, {len(lines)} problems")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
